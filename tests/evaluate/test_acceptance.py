"""Which nodes a walk reaches: against the verifier, and the share of many walks against the probability."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree, grow_level, new_table, select_tree
from eagle_plugin.core.verify import verify_tree
from eagle_plugin.learning.evaluate.acceptance import reach_probabilities, walked_nodes

WALKS, V, WIDTH = 4000, 6, 12


def tree_and_logits() -> tuple[DraftTree, Tensor]:
    """One tree of 9 nodes in 12 places, two levels, and logits [1, WIDTH, V]."""
    gen = torch.Generator().manual_seed(0)
    table = new_table(1, 2 + 6)
    logp = torch.randn(1, 1, 2, generator=gen).log_softmax(-1)
    frontier = grow_level(table, 0, 1, logp, torch.tensor([[[4, 1]]]), None, 2)
    logp = torch.randn(1, 2, 3, generator=gen).log_softmax(-1)
    grow_level(table, 2, 2, logp, torch.tensor([[[0, 4, 3], [2, 1, 5]]]), frontier, 0)
    return select_tree(table, torch.tensor([3]), WIDTH), torch.randn(1, WIDTH, V, generator=gen)


def test_walks_are_those_of_the_verifier_and_reach_nodes_as_often_as_expected() -> None:
    tree, logits = tree_and_logits()
    assert (tree.parents[0] >= 0).sum() == 8
    many = tree.take(torch.zeros(WALKS, dtype=torch.int64))
    params, roots = SamplingParams.of(WALKS, 0.8), torch.arange(WALKS) % 7
    keys = torch.randint(2**62, (WALKS,), generator=torch.Generator().manual_seed(1))
    reached = walked_nodes(many, logits.expand(WALKS, -1, -1), params, keys, roots)

    accepted = verify_tree(many, logits.repeat(WALKS, 1, 1).flatten(0, 1), params, keys, roots, 3)
    wanted = torch.zeros(WALKS, WIDTH + 1, dtype=torch.bool)
    wanted.scatter_(1, torch.where(accepted.index < 0, WIDTH, accepted.index).long(), True)
    assert torch.equal(reached, wanted[:, :WIDTH])
    assert set(reached.sum(1).tolist()) == {1, 2, 3}

    p = reach_probabilities(tree, (logits / 0.8).softmax(-1))[0]
    assert p[0] == 1 and (p[9:] == 0).all()
    error = (p * (1 - p) / WALKS).sqrt() + 1e-9
    assert ((reached.double().mean(0) - p).abs() < 4.5 * error).all()
    other = reach_probabilities(tree, (logits / 1.1).softmax(-1))[0]  # negative control
    assert ((reached.double().mean(0) - other).abs() > 4.5 * error).any()
