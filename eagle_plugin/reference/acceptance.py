"""How many tokens a drafted tree is worth: the expectation over the verification, without a random number."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.propose import Proposals
from eagle_plugin.core.tree import DraftTree


def expected_accept_length(trees: DraftTree, p: Tensor, proposals: Proposals) -> Tensor:
    """The mean accept length [b] float64 of each tree, the bonus token included, under the rule of its children.

    p [b, W, V]: the target's distribution after each node. The draws are those of the trees: average over several trees
    for the mean over the draws too. It is 1 + the sum over the draft nodes of the probability that the walk gets there.
    """
    b, W, V = p.shape
    reached = torch.zeros(b, W, dtype=torch.float64)
    reached[:, 0] = 1.0
    for i in range(b):
        for node in range(W):
            sampled, deterministic = _children_of(trees, i, node)
            if not sampled and not deterministic:
                continue
            left, here = _Residual(p[i, node], _node_proposal(trees, i, sampled, proposals, V)), reached[i, node]
            for child in sampled:
                token = int(trees.tokens[i, child])
                reached[i, child] = here * left.chance(token)
                here = here - reached[i, child]
                left.refuse(token)
            for child in deterministic:
                reached[i, child] = here * left.p[trees.tokens[i, child]]
    return reached.sum(dim=1)


class _Residual:
    """What is left of p and q' at one node while its sampled children are tested one after another."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.p, self.q = p.double(), q.double()  # [V] each

    def chance(self, token: int) -> float:
        """The probability that a child with this token, drawn from what is left of q', is accepted."""
        q = float(self.q[token])
        return min(1.0, float(self.p[token]) / q) if q > 0 else 0.0  # q' ran out of tokens: never drawn, so no child

    def refuse(self, token: int) -> None:
        """Take the refused child's part away: p <- normalise(max(p - q', 0)), q' <- q' without the token."""
        residual = (self.p - self.q).clamp(min=0)
        if residual.sum() > 0:  # 0 where p = q', and then nothing is refused but by rounding
            self.p = residual / residual.sum()
        self.q = self.q.index_fill(0, torch.tensor([token]), 0.0)
        self.q = self.q / self.q.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _children_of(tree: DraftTree, i: int, node: int) -> tuple[list[int], list[int]]:
    """The sampled and the deterministic children of a node of tree i, each in node order."""
    children = (tree.parents[i] == node).nonzero()[:, 0].tolist()
    return [c for c in children if tree.draws[i, c] >= 0], [c for c in children if tree.draws[i, c] < 0]


def _node_proposal(tree: DraftTree, i: int, sampled: list[int], proposals: Proposals, V: int) -> Tensor:
    """q' [V] float32 from which the sampled children of one node of tree i were drawn, 0 without any."""
    q = torch.zeros(V)
    if sampled:
        row = int(tree.draws[i, sampled[0]])
        q[proposals.tokens[i, row]] += proposals.weights[i, row]
    return q
