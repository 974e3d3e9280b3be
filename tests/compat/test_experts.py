"""Experts of other ranks when SGLang calls through the hook; texts are compared in test_parallel_experts.py."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from eagle_sglang_cpu import experts  # noqa: E402
from sglang.srt.layers.moe import fused_moe_native  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402

EXPERTS, WIDTH, INNER = 4, 8, 6
CONFIG = SimpleNamespace(
    apply_router_weight_on_input=False, activation="gelu", gemm1_alpha=None, gemm1_clamp_limit=None
)


def run(layer, x, topk_output, config):
    """Without hooks, and with a plain activation."""
    original = getattr(fused_moe_native.moe_forward_native, "__wrapped__", fused_moe_native.moe_forward_native)
    return original(layer, x, topk_output, config)


@pytest.mark.parametrize("first", [(0, 1, 2, 3), (0, 1), (3,)])
def test_the_parts_of_two_ranks_add_up(first, monkeypatch):
    def act(x):
        left, right = x.chunk(2, dim=-1)
        return left.sigmoid() * right

    monkeypatch.setattr(fused_moe_native, "GeluAndMul", lambda: act)
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, WIDTH), torch.randn(EXPERTS, WIDTH, INNER)
    x, ids = torch.randn(9, WIDTH), torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(9)])
    topk = StandardTopKOutput(torch.rand(9, 2), ids, torch.randn(9, EXPERTS))
    whole = run(SimpleNamespace(num_experts=EXPERTS, w13_weight=w13, w2_weight=w2), x, topk, CONFIG)
    total = torch.zeros_like(x)
    for own in (first, sorted({*range(EXPERTS)} - {*first})):
        local = torch.full((EXPERTS,), -1)
        local[list(own)] = torch.arange(len(own))
        layer = SimpleNamespace(num_experts=EXPERTS, moe_ep_size=2, w13_weight=w13[list(own)], w2_weight=w2[list(own)])
        total += experts.leave_out_others(run, layer, x, topk._replace(topk_ids=local[ids]), CONFIG)
    torch.testing.assert_close(total, whole)


def test_padding_on_one_rank_adds_nothing_and_can_be_captured(monkeypatch):
    monkeypatch.setattr(fused_moe_native, "GeluAndMul", lambda: lambda x: x.chunk(2, dim=-1)[0])
    monkeypatch.setattr(torch.Tensor, "nonzero", None)  # its shape depends on values
    layer = SimpleNamespace(
        num_experts=EXPERTS,
        moe_ep_size=1,
        w13_weight=torch.randn(EXPERTS, 2 * INNER, WIDTH),
        w2_weight=torch.randn(EXPERTS, WIDTH, INNER),
    )
    x, ids = torch.randn(5, WIDTH), torch.tensor([[0, 3], [2, 1], [1, 0], [3, 2], [1, 2]])
    topk = StandardTopKOutput(torch.rand(5, 2), ids, torch.randn(5, EXPERTS))
    whole = run(layer, x, topk, CONFIG)
    padded = topk._replace(topk_ids=ids.index_fill(0, torch.tensor(1), -1))
    found = experts.leave_out_others(run, layer, x, padded, CONFIG)
    assert found[1].eq(0).all() and found[[0, 2, 3, 4]].allclose(whole[[0, 2, 3, 4]]) and whole[1].ne(0).any()
