"""What SGLang's Qwen3.5 looks up in torch.ops.sgl_kernel on a CPU: its norms of heads, its gates, its projections."""

import torch
from torch import Tensor


def fused_sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Multiply x [N, n] in place by sigmoid(gate), of as many numbers per row."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norm every head of q and k [N, heads * head_dim] -> [N * heads, head_dim] of each; weights count from 1."""
    return _norm(q.reshape(-1, head_dim), q_weight, eps), _norm(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where the gate of each head follows its query: q_gate [N, heads * 2 * head_dim]; the gates come last."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).split(head_dim, dim=-1)
    return *fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split rows of [q | k | v | z] and [b | a] into qkv [N, C], z [N, HV, V], b and a [N, HV]."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    z = z.unflatten(1, (num_heads_v, head_v))
    return mixed_qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + 1.0)).to(x.dtype)


def define(library: torch.library.Library) -> None:
    """Add these to the operators of sgl_kernel."""
    library.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
    norms = "Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim"
    library.define(f"fused_qk_gemma_rmsnorm_cpu(Tensor q, {norms}) -> (Tensor, Tensor)")
    library.define(
        f"fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, {norms}, int num_head) -> (Tensor, Tensor, Tensor)"
    )
    library.define(
        "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, "
        "int num_heads_v, int head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    for function in (
        fused_sigmoid_mul,
        fused_qk_gemma_rmsnorm,
        fused_qk_gemma_rmsnorm_with_gate,
        fused_qkvzba_split_reshape_cat_contiguous,
    ):
        library.impl(f"{function.__name__}_cpu", function, "CPU")
