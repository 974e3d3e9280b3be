"""How vLLM's attention for CPUs and ours round in bfloat16: the evidence for docs/vllm.md, "Text in bf16"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import vllm
from engine_signatures import calls, defined, holds, parameters
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, _get_attn_isa
from vllm.v1.kv_cache_interface import KVCacheLayout

from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.kernels import build
from eagle_plugin.kernels.attention import extend_attention, tree_attention

HEADS, KV_HEADS, DIM, BLOCK, TOKENS, ROWS = 9, 3, 64, 128, 300, 8
SCALE = DIM**-0.5
ISA = _get_attn_isa(torch.bfloat16, BLOCK, DIM)


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor, Tensor]:
    """The last queries of a text, and its keys and values."""
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, DIM).bfloat16() * 2
    return query, *torch.randn(2, TOKENS, KV_HEADS, DIM).bfloat16()


def by_platform(query: Tensor, keys: Tensor, values: Tensor, seq_len: int) -> Tensor:
    cache = torch.zeros(4, KV_HEADS, 2 * BLOCK, DIM, dtype=torch.bfloat16)
    halves = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(TOKENS), ISA)
    bounds, lens = torch.tensor([0, len(query)], dtype=torch.int32), torch.tensor([seq_len], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, HEADS, KV_HEADS, DIM, lens, query.dtype, bounds, True, -1, ISA, enable_kv_split=True
    )
    out = torch.empty_like(query)
    blocks = torch.arange(4, dtype=torch.int32)[None]
    tensors = query, *halves, out, bounds, lens
    ops.cpu_attention_with_kv_cache(*tensors, SCALE, True, None, -1, blocks, 0.0, plan, None)
    return out


def by_us(query: Tensor, keys: Tensor, values: Tensor, seq_len: int) -> Tensor:
    slots = torch.arange(TOKENS, dtype=torch.int32)[None]
    lens = torch.tensor([seq_len]), torch.tensor([len(query)])
    first = torch.tensor([0])
    return extend_attention(query, keys, values, slots, first, *lens, first, scale=SCALE)


@pytest.mark.parametrize("attend", [by_platform, by_us])
def test_a_row_does_not_depend_on_the_rows_beside_it(attend, given: tuple[Tensor, Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    """So attention is not what makes a chain, or a tree, differ from one row at a time in the same kernel."""
    query, keys, values = given
    one_by_one = [attend(query[i : i + 1], keys, values, TOKENS - ROWS + i + 1) for i in range(ROWS)]
    assert torch.equal(attend(query, keys, values, TOKENS), torch.cat(one_by_one))


def test_nodes_of_a_tree_are_rounded_as_plain_rows(given: tuple[Tensor, Tensor, Tensor]) -> None:
    query, keys, values = given
    slots, ancestors = torch.arange(TOKENS, dtype=torch.int32)[None], chain_ancestors(ROWS, query.device)[None]
    where = torch.tensor([0]), torch.tensor([TOKENS - ROWS])
    found = tree_attention(query, keys, values, slots, *where, ancestors, tail=ROWS, scale=SCALE)
    assert torch.equal(found, by_us(query, keys, values, TOKENS))


@pytest.mark.skipif(ISA == "amx", reason="this CPU has AMX: vLLM's kernel rounds the softmax to bfloat16")
# This compares two roundings, which differ by CPU, and nothing that we promise: docs/vllm.md has what follows in texts.
@pytest.mark.skipif(not build.cpu_flags() >= build.AVX512, reason="this CPU has AVX2 alone: vLLM rounds otherwise")
def test_without_amx_both_kernels_give_nearly_the_same_bits(given: tuple[Tensor, Tensor, Tensor]) -> None:
    query, keys, values = given
    same = by_us(query, keys, values, TOKENS) == by_platform(query, keys, values, TOKENS)
    assert same.float().mean() > 0.999


def test_weights_in_bfloat16_change_many_outputs(given: tuple[Tensor, Tensor, Tensor]) -> None:
    """What vLLM's kernel for AMX does to them, in torch: a third of the outputs get other bits."""
    query, keys, values = (x.float() for x in given)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
    seen = torch.arange(TOKENS) <= torch.arange(TOKENS - ROWS, TOKENS)[:, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1).T[:, :, None]
    exact, rounded = (
        (torch.einsum("hqk,khd->qhd", w, values) / total).bfloat16() for w in (weights, weights.bfloat16().float())
    )
    assert 0.2 < (exact != rounded).float().mean() < 0.5


def test_the_platforms_kernel_has_no_trees_and_a_cache_of_its_own() -> None:
    """Why plain rows and prompts do not go through it: another layout per instruction set, and no mask."""
    assert CPUAttentionBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    source = Path(vllm.__file__).parent / "v1/attention/backends/cpu_attn.py"
    (stored,) = calls(defined(source, "CPUAttentionBackendImpl.do_kv_cache_update"), "ops.cpu_attn_reshape_and_cache")
    assert "layer.isa" in stored
    assert holds(CPUAttentionBackendImpl.forward, "kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))")
    taken = parameters(ops.cpu_attention_with_kv_cache)
    assert {"causal", "dynamic_causal"} <= set(taken) and not {"mask", "attn_mask", "tree_mask"} & set(taken)
