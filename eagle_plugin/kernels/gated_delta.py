"""Gated delta nets over draft trees: all nodes from the state before the tree, and none of them keeps a state.

After a path of nodes the state of a head is S = e^G S0 + sum over its nodes j of e^(G - Gj) uj kj^T, where Gj is the
sum of the log decays down to node j and uj = betaj (vj - what the state before it says to kj). The uj of a tree are the
solution of one triangular system. That is the chunked form of the rule (Yang et al., arXiv 2412.06464, section 3.3),
with "is above in the tree" in place of "comes before". A node leaves K + V + 1 numbers per head, a state has K * V.

Shapes: B trees of W nodes, parents before their children; HK heads of queries and keys [K], HV heads of values [V].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


class TreePlan(NamedTuple):
    """What all layers of a forward have in common."""

    seen: Tensor  # [B, W, W] bool: node j is node i, or above it
    windows: Tensor  # [B, W, w] int64: what node i convolves, the oldest first: rows of [past w - 1 | nodes]


class Net(NamedTuple):
    """The sizes and weights of one layer; C = 2 * HK * K + HV * V channels are convolved."""

    key_heads: int  # HK
    value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    weight: Tensor  # [C, w] of the convolution
    bias: Tensor | None  # [C]
    a_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]


class Left(NamedTuple):
    """What the nodes of a forward leave for `state_after` and `past_after`."""

    inputs: Tensor  # [B, W, C]: what was convolved
    decays: Tensor  # [B, W, HV] float32: G
    keys: Tensor  # [B, W, HK, K] float32, of length 1
    updates: Tensor  # [B, W, HV, V] float32: u


class Caches(NamedTuple):
    """What an engine keeps of one layer, with any strides but for a contiguous last axis of the states."""

    pasts: Tensor  # [slots, C, w - 1]: what the convolution reads next, the oldest first
    states: Tensor  # [slots, HV, V, K]


class Places(NamedTuple):
    """Where the requests of B trees have their entries."""

    slots: Tensor  # [B] int64; trees of which nobody reads anything may share one
    # [B] int64: tokens before each tree. A request without any has no entry yet, whatever its slot was used for.
    lengths: Tensor | None = None  # None: all have entries


class Projections(NamedTuple):
    """What a layer computed of the nodes, tree by tree; rows may have gaps."""

    mixed_qkv: Tensor  # [B * W, C]
    a: Tensor  # [B * W, HV]
    b: Tensor  # [B * W, HV]


def plan(ancestors: Tensor, taps: int) -> TreePlan:
    """Plan trees by their ancestor bitmasks [B, W] int64 (bit j: node j is seen) for convolutions of `taps` inputs."""
    b, width = ancestors.shape
    nodes = torch.arange(width, device=ancestors.device)
    seen = (ancestors[:, :, None] >> nodes) & 1 == 1
    above = seen & (nodes[:, None] != nodes)
    parents = torch.where(above, nodes, -1).amax(-1) + taps - 1  # the root's is the newest row of the past
    before = torch.cat([(torch.arange(taps - 1, device=nodes.device) - 1).clamp(min=0).expand(b, -1), parents], 1)
    place = (nodes + taps - 1).expand(b, -1)
    windows = [place]
    for _ in range(taps - 1):
        windows.append(before.gather(1, windows[-1]))
    return TreePlan(seen, torch.stack(windows[::-1], -1))


def attend(
    net: Net, mixed_qkv: Tensor, a: Tensor, b: Tensor, past: Tensor, state: Tensor, tree: TreePlan
) -> tuple[Tensor, Left]:
    """One layer over the nodes of B trees: mixed_qkv [B, W, C], a and b [B, W, HV] -> [B, W, HV, V] and what is left.

    past [B, C, w - 1] and state [B, HV, V, K]: from before the trees.
    """
    mixed = convolve(mixed_qkv, past, net.weight, net.bias, tree)
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    q, k, v = (
        part.unflatten(2, (heads, -1))
        for part, heads in zip(
            mixed.split([keys, keys, values], -1), (net.key_heads, net.key_heads, net.value_heads), strict=True
        )
    )
    log_decay, beta = gates(a, b, net.a_log, net.dt_bias)
    out, *left = delta_rule(q, k, v, log_decay, beta, state, tree)
    return out, Left(mixed_qkv, *left)


def convolve(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, tree: TreePlan) -> Tensor:
    """Convolve nodes x [B, W, C] with the nodes above them and the past [B, C, w - 1]; weight [C, w], bias [C].

    Returns silu of it [B, W, C].
    """
    b, width, channels = x.shape
    inputs = _after_past(past, x)
    out = torch.zeros(b, width, channels, device=x.device) if bias is None else bias.float().expand(b, width, -1)
    for tap in range(weight.shape[1]):
        rows = tree.windows[:, :, tap, None].expand(-1, -1, channels)
        out = out + inputs.gather(1, rows).float() * weight[:, tap].float()
    return silu(out).to(x.dtype)


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays and betas [..., HV] float32 of a layer's projections a and b [..., HV]."""
    return -a_log.float().exp() * softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, tree: TreePlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Say what every node reads from the state after it.

    q and k [B, W, HK, K], v [B, W, HV, V]; log_decay and beta [B, W, HV] float32; state [B, HV, V, K].
    Returns [B, W, HV, V] in v's dtype, and decays, keys and updates of `Left`.
    """
    groups = v.shape[2] // k.shape[2]
    q, keys = (_unit(x.float()).transpose(1, 2) for x in (q, k))
    wide_q, wide_k = (x.repeat_interleave(groups, 1) for x in (q * q.shape[-1] ** -0.5, keys))  # [B, HV, W, K]
    values, beta = v.float().transpose(1, 2), beta.transpose(1, 2)[..., None]
    seen = tree.seen[:, None]
    decays = (seen.float() @ log_decay.transpose(1, 2)[..., None])[..., 0]  # [B, HV, W]
    # Only differences down a path count, which are not positive.
    fade = torch.where(seen, decays[..., :, None] - decays[..., None, :], -torch.inf).exp()
    before = state.float().transpose(2, 3)  # [B, HV, K, V]
    grown = decays.exp()[..., None]
    mixed = (beta * (wide_k @ wide_k.transpose(2, 3)) * fade).tril(-1)
    wanted = beta * (values - grown * (wide_k @ before))
    updates = torch.linalg.solve_triangular(mixed, wanted, upper=False, unitriangular=True)
    out = grown * (wide_q @ before) + (wide_q @ wide_k.transpose(2, 3) * fade) @ updates
    return out.transpose(1, 2).to(v.dtype), decays.transpose(1, 2), keys.transpose(1, 2), updates.transpose(1, 2)


def state_after(state: Tensor, left: Left, tree: TreePlan, last: Tensor) -> Tensor:
    """The states [B, HV, V, K] after the nodes `last` [B] int64, in the dtype of `state`, that before the trees."""
    groups = left.updates.shape[2] // left.keys.shape[2]
    decays, keys, updates = (x.transpose(1, 2) for x in left[1:])  # [B, heads, W, ...]
    seen = _row(tree.seen, last)[:, None]  # [B, 1, W]
    total = decays.gather(2, last[:, None, None].expand(-1, decays.shape[1], 1))  # [B, HV, 1]
    fade = torch.where(seen, total - decays, -torch.inf).exp()
    added = (updates * fade[..., None]).transpose(2, 3) @ keys.repeat_interleave(groups, 1)
    return (state.float() * total.exp()[..., None] + added).to(state.dtype)


def past_after(past: Tensor, left: Left, tree: TreePlan, last: Tensor) -> Tensor:
    """What the convolution reads after the nodes `last` [B] int64, in the dtype of what it read before: [B, C, w - 1].

    past [B, C, w - 1]: from before the trees.
    """
    inputs = _after_past(past, left.inputs)
    rows = _row(tree.windows, last)[:, 1:, None].expand(-1, -1, inputs.shape[2])
    return inputs.gather(1, rows).transpose(1, 2).to(past.dtype)


def _after_past(past: Tensor, x: Tensor) -> Tensor:
    """[B, w - 1 + W, C], in the dtype of x [B, W, C]."""
    return torch.cat([past.transpose(1, 2).to(x.dtype), x], 1)


def _row(values: Tensor, last: Tensor) -> Tensor:
    return values.gather(1, last[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
