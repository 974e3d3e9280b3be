"""Verification of a draft tree: the rule, and the move of the accepted rows of the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import Filters, SamplingParams
from eagle_plugin.core.tree import DraftTree


class Accepted(NamedTuple):
    """The accepted path of each request; E = max_accept_length, the most tokens that one round may yield."""

    index: Tensor  # type: ignore[assignment]  # [b, E] int32, accepted nodes from the root (index[:, 0] = 0), -1 padded
    lengths: Tensor  # [b] int32, accept length: accepted draft tokens + the bonus token, 1..E
    tokens: Tensor  # [b, E] int64, accepted draft tokens, then the bonus token, 0 padded

    def last_nodes(self) -> Tensor:
        """The last accepted node of each request, [b] int64."""
        return self.index.gather(1, self.lengths[:, None].long() - 1)[:, 0].long()


def verify_greedy(tokens: Tensor, parents: Tensor, targets: Tensor, max_accept_length: int) -> Accepted:
    """Walk from the root to the child that the target itself would have chosen, as long as there is one.

    tokens [b, W] int64, parents [b, W] int32 (-1: root, padding), targets [b, W] int64 (the target's choice after each
    node). Among equal tokens the first child wins. At most max_accept_length - 1 draft tokens are accepted; the bonus
    token is the target's choice after the last of them. Padding nodes have no parent, so they are never reached.
    """
    b, W = tokens.shape
    nodes = torch.arange(W, device=tokens.device)
    index = torch.full((b, max_accept_length), -1, dtype=torch.int32, device=tokens.device)
    index[:, 0] = 0
    out = torch.zeros(b, max_accept_length, dtype=torch.int64, device=tokens.device)
    current = torch.zeros(b, 1, dtype=torch.int64, device=tokens.device)
    lengths = torch.ones(b, 1, dtype=torch.int64, device=tokens.device)
    alive = torch.ones(b, 1, dtype=torch.bool, device=tokens.device)
    for step in range(1, max_accept_length):
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


def verify_tree(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    lengths: Tensor,
    max_accept_length: int,
    *,
    filters: Filters = "joint",
) -> Accepted:
    """Walk each tree to the child that the target draws, as long as there is one.

    tree of [b, W] nodes; logits [b * W, V] float32, row i * W + j after node j of request i, after penalties, grammar
    mask and bias; params, rng_keys [b] int64 and lengths [b] int64 (the position of the root) of b requests; filters as
    in `target_distribution`. The tokens are those that plain draws by the same keys give: docs/sampling.md has the
    proof. At temperature 0 the walk is `verify_greedy` of the argmax.
    """
    b, width = tree.tokens.shape
    positions = (lengths[:, None] + tree.depths).view(-1)
    drawn = draw_tokens(logits, params.for_rows(width), rng_keys.repeat_interleave(width), positions, filters)
    return verify_greedy(tree.tokens, tree.parents, drawn.view(b, width), max_accept_length)


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
