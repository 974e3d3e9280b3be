"""Verification of a draft tree against the target's choices, and the move of the accepted rows of the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """The accepted path of each request; E = output stride, the most tokens that one round may yield."""

    index: Tensor  # type: ignore[assignment]  # [b, E] int32, accepted nodes from the root (index[:, 0] = 0), -1 padded
    lengths: Tensor  # [b] int32, accept length: accepted draft tokens + the bonus token, 1..E
    tokens: Tensor  # [b, E] int64, accepted draft tokens, then the bonus token, 0 padded


def verify_greedy(tokens: Tensor, parents: Tensor, targets: Tensor, stride: int) -> Accepted:
    """Walk from the root to the child that the target itself would have chosen, as long as there is one.

    tokens [b, W] int64, parents [b, W] int32 (-1: root, padding), targets [b, W] int64 (the target's choice after each
    node). Among equal tokens the first child wins. At most stride - 1 draft tokens are accepted; the bonus token is the
    target's choice after the last of them. Padding nodes have no parent, so they are never reached.
    """
    b, W = tokens.shape
    nodes = torch.arange(W, device=tokens.device)
    index = torch.full((b, stride), -1, dtype=torch.int32, device=tokens.device)
    index[:, 0] = 0
    out = torch.zeros(b, stride, dtype=torch.int64, device=tokens.device)
    current = torch.zeros(b, 1, dtype=torch.int64, device=tokens.device)
    lengths = torch.ones(b, 1, dtype=torch.int64, device=tokens.device)
    alive = torch.ones(b, 1, dtype=torch.bool, device=tokens.device)
    for step in range(1, stride):
        chosen = targets.gather(1, current)
        match = (parents == current) & (tokens == chosen)
        child = torch.where(match, nodes, W).amin(dim=1, keepdim=True) if W else current
        alive = alive & (child < W)
        current = torch.where(alive, child, current)
        index[:, step : step + 1] = torch.where(alive, child, -1).int()
        out[:, step - 1 : step] = torch.where(alive, chosen, 0)
        lengths += alive
    out.scatter_(1, lengths - 1, targets.gather(1, current))
    return Accepted(index, lengths[:, 0].int(), out)


def compact_rows(cache: Tensor, window: Tensor, index: Tensor, lengths: Tensor) -> None:
    """Move the accepted rows of each request to the front of its window, in place.

    cache [slots, ...], window [b, W] int64 (slot of each node), index [b, E] int32 and lengths [b] int32 as in
    `Accepted`: row window[i, index[i, j]] -> window[i, j] for j < lengths[i]. Every source is read before any row is
    written; the windows of two requests share no slot.
    """
    n = min(window.shape[1], index.shape[1])
    valid = torch.arange(n, device=window.device) < lengths[:, None]
    to = window[:, :n]
    source = torch.where(valid, window.gather(1, index[:, :n].clamp(min=0).long()), to)  # not accepted: onto itself
    cache[to.reshape(-1)] = cache[source.reshape(-1)]
