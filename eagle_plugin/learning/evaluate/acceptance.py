"""The expected accept length of a drafted tree: over the verification, without random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.propose import Proposals
from eagle_plugin.core.tree import DraftTree

TINY = torch.finfo(torch.float64).tiny


def expected_accept_length(trees: DraftTree, p: Tensor, proposals: Proposals) -> Tensor:
    """The mean accept length [b] float64 of each tree, with the bonus token, under the rule that chose its children.

    p [b, W, V]: the target's distribution after each node. The sampled children of the trees are given: average over
    several trees for the mean over these draws too. It is 1 + the sum over the draft nodes of the probability that the
    walk reaches them.
    """
    return reach_probabilities(trees, p, proposals).sum(dim=1)


def reach_probabilities(trees: DraftTree, p: Tensor, proposals: Proposals) -> Tensor:
    """The probability [b, W] float64 that the verification of `core.verify.verify_tree` walks to each node.

    Arguments as for `expected_accept_length`; the root's is 1, that of padding 0. The sum over the nodes of one depth
    is the probability that this many drafts or more are accepted.

    Sampled children of a node are tested in node order. A test turns the target's p into max(p - q', 0) / Z and takes
    the child out of q'; both are kept at the M tokens of q' only, because at any other token p is only divided by Z,
    and deterministic children have no weight in q'.
    """
    b, W = trees.tokens.shape
    nodes = torch.arange(W, device=p.device)
    child_of = trees.parents[:, None, :] == nodes[:, None]  # [b, node, child]
    sampled = child_of & (trees.draws >= 0)[:, None, :]
    row = torch.where(sampled, trees.draws[:, None, :], 0).amax(dim=2).long()  # [b, W]; one row draws for a node
    M = proposals.tokens.shape[2]
    top = proposals.tokens.gather(1, row[:, :, None].expand(b, W, M))
    q = proposals.weights.gather(1, row[:, :, None].expand(b, W, M)).double() * sampled.any(dim=2)[:, :, None]
    left = p.gather(2, top).double()  # p at the top tokens; refusals change it
    total = torch.ones(b, W, dtype=torch.float64, device=p.device)  # product of the Z so far

    chance = torch.zeros(b, W, dtype=torch.float64, device=p.device)  # that a node is accepted, given its parent
    refused = torch.ones(b, W, dtype=torch.float64, device=p.device)  # that no sampled child of a node was accepted
    order = sampled.cumsum(dim=2)
    for nth in range(1, int(sampled.sum(dim=2).amax()) + 1):
        is_nth = sampled & (order == nth)
        tests = is_nth.any(dim=2)  # [b, W]
        child = is_nth.int().argmax(dim=2)
        mark = (top == trees.tokens.gather(1, child)[:, :, None]) & (q > 0) & tests[:, :, None]  # [b, W, M]
        q_child, p_child = (torch.where(mark, x, 0.0).sum(dim=2) for x in (q, left))
        # q' may have run out of tokens: such a child was never drawn
        accept = torch.where(q_child > 0, (p_child / q_child.clamp(min=TINY)).clamp(max=1), 0.0)
        chance.scatter_add_(1, child, torch.where(tests, refused * accept, 0.0))
        refused = torch.where(tests, refused * (1 - accept), refused)
        residual = (left - q).clamp(min=0)
        z = 1 - torch.minimum(left, q).sum(dim=2)
        keeps = (z > 1e-12) & tests  # 0 where p = q', where only rounding refuses
        z = torch.where(keeps, z, 1.0)
        left = torch.where(keeps[:, :, None], residual / z[:, :, None], left)
        total = total * z
        q = torch.where(tests[:, :, None], q.masked_fill(mark, 0.0), q)
        q = q / q.sum(dim=2, keepdim=True).clamp(min=TINY)

    parent = trees.parents.clamp(min=0).long()
    deterministic = (trees.parents >= 0) & (trees.draws < 0)
    p_child = p[torch.arange(b, device=p.device)[:, None], parent, trees.tokens].double() / total.gather(1, parent)
    chance = torch.where(deterministic, refused.gather(1, parent) * p_child, chance)

    reached = torch.zeros(b, W, dtype=torch.float64, device=p.device)
    reached[:, 0] = 1.0
    for node in range(1, W):  # parents come before children
        reached[:, node] = torch.where(
            trees.parents[:, node] >= 0, reached.gather(1, parent[:, node : node + 1])[:, 0] * chance[:, node], 0.0
        )
    return reached
