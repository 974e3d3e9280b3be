"""Verification of a draft tree: the rule, and the move of the accepted rows of the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.propose import Proposals
from eagle_plugin.core.sampling import Filters, SamplingParams, draw, target_distribution
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
    proposals: Proposals,
    uniforms: Tensor,
    max_accept_length: int,
    *,
    filters: Filters = "joint",
) -> Accepted:
    """Walk each tree so that the tokens have exactly the target's distribution, at every temperature.

    tree of [b, W] nodes; logits [b * W, V] float32, row i * W + j after node j of request i, after penalties, grammar
    mask and bias; params and proposals of b requests; uniforms [b, max_accept_length, N] float64; filters as in
    `target_distribution`. At a node with distribution p:

    1. Its sampled children, drawn without replacement from q', are tested in node order, N - 1 of them at most: s is
       accepted if u * q'(s) < p(s); else p becomes max(p - q', 0), normalised, and q' is normalised without s. One
       such test is speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), several in turn are
       recursive rejection (SpecInfer, arXiv 2305.09781).
    2. Draw x from what is left of p. If x is a deterministic child, go there; else x is the bonus token and the walk
       ends.

    Step 2 alone is plain sampling, whatever the children are. The rule is lossless because no decision about a sampled
    child, including its slot in the tree, depends on the token that was drawn. (Greedy and sampled candidates together:
    Hu et al., arXiv 2502.18779.) At temperature 0 all of p is on one token, and the walk is `verify_greedy` of the
    argmax.
    """
    b, W = tree.tokens.shape
    out = Accepted(
        torch.full((b, max_accept_length), -1, dtype=torch.int32, device=logits.device),
        torch.zeros(b, dtype=torch.int32, device=logits.device),
        torch.zeros(b, max_accept_length, dtype=torch.int64, device=logits.device),
    )
    for i in range(b):
        row = params.rows(slice(i, i + 1))
        greedy = bool(row.is_greedy()[0])
        parents, draws, tokens = tree.parents[i].tolist(), tree.draws[i].tolist(), tree.tokens[i].tolist()
        node, step = 0, 0
        out.index[i, 0] = 0
        while True:
            p = target_distribution(logits[i * W + node][None], row, filters)[0]
            u = uniforms[i, step].tolist()
            children = [c for c in range(W) if parents[c] == node] if step + 1 < max_accept_length else []
            sampled = [c for c in children if draws[c] >= 0 and not greedy]
            q = torch.zeros_like(p)
            if sampled:
                q[proposals.tokens[i, draws[sampled[0]]]] += proposals.weights[i, draws[sampled[0]]]
            child = None
            for c, number in zip(sampled, u[:-1], strict=False):
                x = tokens[c]
                if number * q[x] < p[x]:
                    child = c
                    break
                left = (p - q).clamp(min=0)
                p = left / left.sum() if left.sum() > 0 else p
                q[x] = 0
                q /= q.sum().clamp(min=torch.finfo(q.dtype).tiny)
            if child is None:
                x = draw(p, u[-1])
                child = next((c for c in children if c not in sampled and tokens[c] == x), None)
            out.tokens[i, step] = x
            step += 1
            if child is None:
                break
            out.index[i, step] = node = child
        out.lengths[i] = step
    return out


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
