"""Attention over a paged cache in plain torch: the oracle of the kernels, and what runs where there is no kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v of one request in float32 arithmetic, in q's dtype.

    q [R, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv], visible [R, n] bool. A logit x becomes cap * tanh(x / cap) when
    logit_cap > 0; sinks [Hq] float32 are extra logits in the denominator. A row that sees no key gives zeros.
    k and v, of any float type, are multiplied by k_scale and v_scale [1] float32.
    """
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    scaled = (x.float() if by is None else x.float() * by for x, by in ((k, k_scale), (v, v_scale)))
    keys, values = (x.repeat_interleave(group, dim=1) for x in scaled)
    # a key that no row sees may have any value, NaN too (a slot that was never written)
    seen = visible.any(dim=0)[:, None, None]
    keys, values = torch.where(seen, keys, 0.0), torch.where(seen, values, 0.0)
    logits = torch.einsum("rhd,nhd->hrn", q.float(), keys) * scale
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~visible, -torch.inf)
    sink = torch.full((heads,), -torch.inf, device=q.device) if sinks is None else sinks
    logits = torch.cat([logits, sink[:, None, None].expand(heads, rows, 1)], dim=-1)
    p = logits.softmax(dim=-1)[..., :-1].nan_to_num(0.0) if logits.shape[-1] else logits
    return torch.einsum("hrn,nhd->rhd", p, values).to(q.dtype)


def first_visible(position: Tensor, window: int, chunk: int) -> Tensor:
    """Return the lowest position that rows at these positions see, of the same shape; a tail key counts at its depth.

    window >= 0: so many keys before the row (-1 is off). chunk > 0: the positions of the row's own chunk (0 is off).
    """
    first = position - window if window >= 0 else torch.zeros_like(position)
    return torch.maximum(first, position - position % chunk) if chunk > 0 else first


def tree_visible(ancestors: Tensor, prefix: int, tail: int, window: int, chunk: int = 0) -> Tensor:
    """Return [R, prefix + tail] bool for the ancestor bitmasks [R] of one request."""
    bits = (ancestors[:, None] >> torch.arange(64, device=ancestors.device)) & 1
    ranks = prefix + bits.cumsum(dim=1) - 1  # the position of a set bit's node: parents have lower bits than children
    first = first_visible(ranks[:, -1:], window, chunk)
    keys = torch.arange(prefix, device=ancestors.device)
    return torch.cat([keys >= first, (bits.bool() & (ranks >= first))[:, :tail]], dim=1)


def extend_visible(
    seq_len: int, extend_len: int, causal: bool, mask: Tensor | None, window: int, device: torch.device, chunk: int = 0
) -> Tensor:
    """Return [e, seq_len] bool for the e new tokens; mask [e, e] bool replaces the causal rule among them."""
    prefix = seq_len - extend_len
    keys = torch.arange(seq_len, device=device)
    if mask is not None:
        position = prefix + mask.sum(dim=1, keepdim=True) - 1
        first = first_visible(position, window, chunk)
        return torch.cat([keys[:prefix] >= first, mask & (prefix + mask.cumsum(dim=1) - 1 >= first)], dim=1)
    position = prefix + torch.arange(extend_len, device=device)[:, None]
    near = keys >= first_visible(position, window, chunk)
    return near & (keys <= position) if causal else near
