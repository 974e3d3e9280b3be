"""Which nodes of drafted trees a walk reaches: with the root, as many as the round yields tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree


def walked_nodes(trees: DraftTree, logits: Tensor, params: SamplingParams, rng_keys: Tensor, roots: Tensor) -> Tensor:
    """Whether `core.verify.verify_tree` accepts each node, [b, W] bool; the root counts as accepted, padding not.

    logits [b, W, V] float32 after the nodes; params, rng_keys [b] int64 and roots [b] int64 (their positions) are of b
    requests. Drawn is at the nodes of the walk alone: a draw reads the whole vocabulary, and most nodes are not on it.
    """
    b, width = trees.tokens.shape
    reached = torch.zeros(b, width, dtype=torch.bool, device=roots.device)
    walks, node = torch.arange(b, device=roots.device), torch.zeros_like(roots)
    depth = 0
    while len(walks):
        reached[walks, node] = True
        drawn = draw_tokens(logits[walks, node], params.rows(walks), rng_keys[walks], roots[walks] + depth)
        child = (trees.parents[walks] == node[:, None]) & (trees.tokens[walks] == drawn[:, None])
        goes_on = child.any(dim=1)
        walks, node = walks[goes_on], child[goes_on].int().argmax(dim=1)
        depth += 1
    return reached


def reach_probabilities(trees: DraftTree, p: Tensor) -> Tensor:
    """The probability [b, W] float64 that a walk reaches each node of trees that know nothing of what is drawn.

    p [b, W, V]: the target's distribution after each node. A node's is the product of p of the tokens on its path; the
    root's is 1, that of padding 0.
    """
    b, width = trees.tokens.shape
    reached = torch.zeros(b, width, dtype=torch.float64, device=p.device)
    reached[:, 0] = 1.0
    requests = torch.arange(b, device=p.device)
    for node in range(1, width):  # parents come before children
        parent = trees.parents[:, node].long()
        chance = reached[requests, parent] * p[requests, parent, trees.tokens[:, node]].double()
        reached[:, node] = torch.where(parent >= 0, chance, 0.0)
    return reached
