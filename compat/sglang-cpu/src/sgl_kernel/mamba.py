"""Gated delta nets (Qwen3-Next) in torch: what SGLang takes from sgl_kernel.mamba and torch.ops.sgl_kernel on a CPU.

N tokens of b sequences one after another; HK heads of queries and keys [K], HV heads of values [V], HV a multiple of
HK. The pools are written in place: states [slots, HV, V, K], inputs of convolutions [slots, C, w - 1].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

CHUNK = 64


def _activated(x: Tensor, activation: str | bool | None) -> Tensor:
    return silu(x) if activation in ("silu", "swish", True) else x


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve the columns of x [C, N] with the w - 1 before them, of the pool at first; weight [C, w] -> [C, N]."""
    out, before = torch.empty_like(x), weight.shape[1] - 1
    starts = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices[: len(starts) - 1].tolist()):
        new = x[:, starts[i] : starts[i + 1]]
        if not new.shape[1]:
            continue
        past = conv_states[slot, :, :before] if bool(has_initial_state[i]) else torch.zeros_like(conv_states[slot])
        line = torch.cat([past[:, :before].to(x.dtype), new], 1)
        line_out = conv1d(line[None], weight[:, None].to(x.dtype), bias, groups=len(x))[0]
        out[:, starts[i] : starts[i + 1]] = _activated(line_out, activation)
        conv_states[slot, :, :before] = line[:, line.shape[1] - before :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    **trees: Any,
) -> Tensor:
    """The same for one token of each sequence, x [b, C] -> [b, C]."""
    if x.dim() != 2 or conv_state_indices is None:
        raise NotImplementedError(
            "sgl_kernel.causal_conv1d_update_cpu got drafts, wanted one token per request: on a CPU without AMX "
            "SGLang's own worker cannot draft for Qwen3-Next; the log says why eagle-plugin's does not serve."
        )
    slots, before = conv_state_indices.long(), weight.shape[1] - 1
    line = torch.cat([conv_state[slots][:, :, :before].to(x.dtype), x[:, :, None]], 2)
    out = (line * weight.to(x.dtype)).sum(-1)
    conv_state[slots, :, :before] = line[:, :, 1:].to(conv_state.dtype)
    return _activated(out if bias is None else out + bias, activation)


def fused_gdn_gating(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays and betas [1, N, HV] float32 of the projections a and b [N, HV]."""
    log_decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return log_decay[None], b.float().sigmoid()[None]


def _heads(q: Tensor, k: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [.., HV, K] float32 of length 1, the queries divided by the square root of K."""
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    groups = values // q.shape[-2]
    return (q * q.shape[-1] ** -0.5).repeat_interleave(groups, -2), k.repeat_interleave(groups, -2)


def _chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence: q and k [HV, T, K], v [HV, T, V], the others [HV, T]; state [HV, K, V]."""
    decays = log_decay.cumsum(-1)
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    fade = (decays[:, :, None] - decays[:, None]).masked_fill(~causal, -torch.inf).exp()
    grown, beta = decays.exp()[..., None], beta[..., None]
    mixed = (beta * (k @ k.mT) * fade).tril(-1)
    updates = torch.linalg.solve_triangular(mixed, beta * (v - grown * (k @ state)), upper=False, unitriangular=True)
    out = grown * (q @ state) + (q @ k.mT * fade) @ updates
    last = (decays[:, -1:] - decays).exp()[..., None]
    return out, state * grown[:, -1:] + (k * last).mT @ updates


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """The rule (Yang et al., arXiv 2412.06464, section 3.3), 64 tokens at a time.

    q and k [1, N, HK, K], v [1, N, HV, V], g and beta [1, N, HV] -> ([1, N, HV, V], None, None).
    """
    wide_q, wide_k = _heads(q[0], k[0], v.shape[2])
    by_head = [x.float().transpose(0, 1) for x in (wide_q, wide_k, v[0], g[0], beta[0])]
    out = torch.empty_like(v)
    starts = cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices[: len(starts) - 1].tolist()):
        state = initial_state[slot].float().mT
        for start in range(starts[i], starts[i + 1], CHUNK):
            part = slice(start, min(start + CHUNK, starts[i + 1]))
            q_part, k_part, v_part, g_part, beta_part = (x[:, part] for x in by_head)
            part_out, state = _chunk(q_part, k_part, v_part, g_part, beta_part, state)
            out[0, part] = part_out.transpose(0, 1).to(v.dtype)
        initial_state[slot] = state.mT.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,  # noqa: N803 - the engine's names
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """The rule for one token of each of b sequences: q and k [1, b, HK, K], v [1, b, HV, V] -> [1, b, HV, V]."""
    log_decay, beta = fused_gdn_gating(A_log, a.view(-1, a.shape[-1]), b.view(-1, b.shape[-1]), dt_bias)
    wide_q, wide_k = _heads(q[0], k[0], v.shape[2])
    slots = initial_state_indices.long()
    state = initial_state_source[slots].float() * log_decay[0].exp()[..., None, None]
    update = beta[0][..., None] * (v[0].float() - (state @ wide_k[..., None])[..., 0])
    state = state + update[..., None] * wide_k[:, :, None]
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return (state @ wide_q[..., None])[..., 0][None].to(v.dtype)
