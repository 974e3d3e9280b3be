"""The operators of Qwen3.5 on a CPU, against what they are named after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")
import sgl_kernel  # noqa: F401
from eagle_sglang_cpu import hooks

N, HEADS, KV_HEADS, DIM = 5, 4, 2, 16
OPS = torch.ops.sgl_kernel


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (DIM,), weight + 1, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_heads_and_their_gates(dtype: torch.dtype) -> None:
    q_gate, k = draw(N, HEADS, 2, DIM, seed=1).to(dtype), draw(N, KV_HEADS * DIM, seed=2).to(dtype)
    weights = draw(DIM, seed=3), draw(DIM, seed=4)
    wide = torch.cat([q_gate.flatten(1), k], 1)  # parts of one projection: no rows of theirs are contiguous
    q_part, k_part = wide.split([HEADS * 2 * DIM, KV_HEADS * DIM], 1)
    q, key, gate = OPS.fused_qk_gemma_rmsnorm_with_gate_cpu(q_part, k_part, *weights, 1e-6, DIM, HEADS)
    torch.testing.assert_close(q, normed(q_gate[:, :, 0].float(), weights[0]).reshape(-1, DIM).to(dtype))
    torch.testing.assert_close(key, normed(k.float().view(-1, DIM), weights[1]).to(dtype))
    assert torch.equal(gate, q_gate[:, :, 1].reshape(-1, DIM)) and gate.is_contiguous()
    alone = OPS.fused_qk_gemma_rmsnorm_cpu(q_gate[:, :, 0].flatten(1), k_part, *weights, 1e-6, DIM)
    assert torch.equal(alone[0], q) and torch.equal(alone[1], key)


def test_gates_are_applied_in_place() -> None:
    x, gate = draw(N, HEADS * DIM, seed=1), draw(N, HEADS, DIM, seed=2)
    wanted = x * gate.flatten(1).sigmoid()
    OPS.fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, wanted)


def test_projections_side_by_side() -> None:
    q, k, v, z = (draw(N, h, DIM, seed=i) for i, h in enumerate((KV_HEADS, KV_HEADS, HEADS, HEADS)))
    b, a = draw(N, HEADS, seed=8), draw(N, HEADS, seed=9)
    rows = torch.cat([x.flatten(1) for x in (q, k, v, z)], 1), torch.cat([b, a], 1)
    found = OPS.fused_qkvzba_split_reshape_cat_contiguous_cpu(*rows, KV_HEADS, HEADS, DIM, DIM)
    for ours, wanted in zip(found, (torch.cat([q, k, v], 1).flatten(1), z, b, a), strict=True):
        assert torch.equal(ours, wanted) and ours.is_contiguous()


def test_the_norm_and_gate_after_the_states() -> None:
    def triton(**_: object) -> None:
        raise AssertionError("no CPU can launch it")

    x, z, weight = draw(N * HEADS, DIM, seed=1), draw(N, HEADS, DIM, seed=2), draw(DIM, seed=3)
    wanted = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6) * torch.nn.functional.silu(z.view(-1, DIM))
    usual = {"group_size": None, "norm_before_gate": True, "is_rms_norm": True}
    found = hooks.gated_layer_norm(triton, x=x, weight=weight, bias=None, z=z, eps=1e-6, **usual)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(AssertionError):
        hooks.gated_layer_norm(triton, x=x, weight=weight, bias=None, z=z, **usual | {"norm_before_gate": False})
