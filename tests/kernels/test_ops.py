"""The torch operators: true schemas, fakes with the shapes of the real thing, and whole graphs under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_plugin.core.propose import NUM_SAMPLED, SLOT_WEIGHTS
from eagle_plugin.core.tree import new_table
from eagle_plugin.kernels import int8_linear, ops

OPS = torch.ops.eagle_plugin
B, K, W, V, M, MAX_ACCEPT_LENGTH = 3, 2, 5, 40, 8, 3


def params(rows: int) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), 0.8),
        torch.full((rows,), V, dtype=torch.int32),
        torch.full((rows,), 0.95),
        torch.zeros(rows),
    )


def cases() -> dict[str, tuple[Any, ...]]:
    gen = torch.Generator().manual_seed(0)
    logp, index = torch.randn(B, V, generator=gen).log_softmax(-1).topk(M)
    level = (logp[:, None, :K].contiguous(), index[:, None, :K].contiguous())
    table = new_table(B, K)
    grown = OPS.grow_level(*table, 0, 1, *level, None, None, None, None, 0)
    assert grown[0].shape == (B, 0)
    tree = OPS.select_tree(*table, torch.zeros(B, dtype=torch.int64), W)
    q_tokens, q_weights = torch.zeros(B, 1, M, dtype=torch.int64), torch.zeros(B, 1, M)
    u = torch.rand(B, MAX_ACCEPT_LENGTH, NUM_SAMPLED + 1, generator=gen, dtype=torch.float64)
    q = torch.randn(B * W, 4, 16, generator=gen)
    k_cache, v_cache = (torch.randn(64, 2, 16, generator=gen) for _ in range(2))
    slots = torch.randperm(64, generator=gen)[: B * 16].view(B, 16).int()
    loc = torch.tensor([1, 5])
    packed = int8_linear.pack(torch.randn(32, 64, generator=gen).bfloat16())
    assert packed is not None
    return {
        "bf16_linear": (*(torch.randn(n, 64, generator=gen).bfloat16() for n in (B, 32)), None),
        "int8_linear": (torch.randn(B, 64, generator=gen).bfloat16(), *packed),
        "uniforms": (torch.arange(B), torch.arange(B), 1, 5),
        "topk_log_softmax": (torch.randn(B, V, generator=gen), 4),
        "propose": (logp, index, *params(B), u[:, 0, :NUM_SAMPLED].contiguous(), K, 0, 1, None, list(SLOT_WEIGHTS)),
        "grow_level": (*table, 0, 1, *level, None, None, None, None, 1),
        "grow_levels": (*new_table(B, 3 * K), 2, K, *(x.repeat(1, 1 + K, 1) for x in level), None),
        "select_tree": (*table, torch.zeros(B, dtype=torch.int64), W),
        "verify_tree": (
            *tree,
            torch.randn(B * W, V, generator=gen),
            *params(B),
            q_tokens,
            q_weights,
            u,
            MAX_ACCEPT_LENGTH,
        ),
        "store_kv": (k_cache, v_cache, loc, k_cache[:2].clone(), v_cache[:2].clone()),
        "tree_attention": (
            *(q, k_cache, v_cache, slots, torch.arange(B), torch.full((B,), 7), tree[3], W),
            *(0.25, 0.0, -1, None, 8),
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_schema_and_fake_agree_with_the_kernel(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name), cases()[name], test_utils=("test_schema", "test_faketensor"))


def test_every_operator_has_a_case() -> None:
    registered = {name.split("::")[1].split(".")[0] for name in ops.LIBRARY._op_defs}
    assert registered == set(cases())


def test_a_round_compiles_into_one_graph() -> None:
    logp, index, *rest = cases()["propose"]
    logits = torch.randn(B * W, V)

    def draft_and_verify(logp: Tensor, index: Tensor, logits: Tensor) -> Tensor:
        children = OPS.propose(logp, index, *rest)
        table = new_table(B, K + NUM_SAMPLED)
        shape = (B, 1, K + NUM_SAMPLED)
        OPS.grow_level(*table, 0, 1, *(values.view(shape) for values in children[:3]), None, None, None, 0)
        tree = OPS.select_tree(*table, index[:, 0].contiguous(), W)
        u = torch.full((B, MAX_ACCEPT_LENGTH, NUM_SAMPLED + 1), 0.3, dtype=torch.float64)
        q = (children[3][:, None], children[4][:, None])
        return OPS.verify_tree(*tree, logits, *params(B), *q, u, MAX_ACCEPT_LENGTH)[2]

    compiled = torch.compile(draft_and_verify, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logp, index, logits), draft_and_verify(logp, index, logits))
