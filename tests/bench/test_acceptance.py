"""What benchmarks/acceptance.py computes: chains in one block, and smaller trees of one table."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.acceptance import NODES, block_lengths, by_nodes
from eagle_plugin.core.tree import grow_levels, new_table, select_tree
from eagle_plugin.learning.evaluate.acceptance import reach_probabilities
from eagle_plugin.learning.evaluate.chains import chain_acceptance

V, STEPS = 5, NODES[-1] - 1


def chains(n: int, apart: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p and q [n, STEPS, V] of levels that do not depend on the path, drafts [n, STEPS] from q, and the map of ids."""
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(STEPS, V, generator=gen)
    p = logits.softmax(-1).expand(n, -1, -1)
    q = (logits + apart * torch.randn(STEPS, V, generator=gen)).softmax(-1)
    drafts = torch.stack([torch.multinomial(level, n, replacement=True, generator=gen) for level in q], dim=1)
    return p, drafts, q.expand(n, -1, -1), torch.arange(V)


def verify_block(p: Tensor, drafts: Tensor, q: Tensor, gen: torch.Generator) -> int:
    """The accept length of one chain as algorithm 2 of arXiv 2403.10444 says it, with its random numbers."""
    n, kept, length = len(drafts), 1.0, 1
    for j in range(n):
        kept = min(kept * float(p[j, drafts[j]] / q[j, drafts[j]]), 1.0)
        accept = kept
        if j + 1 < n:
            above = float((kept * p[j + 1] - q[j + 1]).clamp(min=0).sum())
            accept = above / max(above + 1 - kept, 1e-300)
        if float(torch.rand((), generator=gen)) < accept:
            length = j + 2
    return length


def test_block_lengths_are_those_of_the_algorithm() -> None:
    n = 1500
    p, drafts, q, to_target = chains(n, apart=0.7)
    found = torch.stack(list(block_lengths(p, drafts, q, to_target)), dim=1)
    gen = torch.Generator().manual_seed(1)
    for i, nodes in enumerate(NODES[:5]):
        seen = torch.tensor([verify_block(p[0], chain, q[0], gen) for chain in drafts[:, : nodes - 1]]).double()
        error = (seen.var() / n + found[:, i].var() / n).sqrt() + 1e-9
        assert (seen.mean() - found[:, i].mean()).abs() < 4.5 * error
    one_by_one = 1 + chain_acceptance(p, drafts, q, to_target).cumsum(1)
    torch.testing.assert_close(found[:, 0], one_by_one[:, 0], rtol=1e-5, atol=1e-5)
    assert (found[:, 1:5].mean(0) > one_by_one[:, [nodes - 2 for nodes in NODES[1:5]]].mean(0)).all()


def test_a_head_that_is_the_target_is_never_refused() -> None:
    p, drafts, q, to_target = chains(20, apart=0.0)
    found = torch.stack(list(block_lengths(p, drafts, q, to_target)), dim=1)
    torch.testing.assert_close(found, torch.tensor(NODES).double().expand(20, -1), rtol=1e-5, atol=1e-5)


def test_smaller_trees_of_one_table() -> None:
    """Their accept lengths are read from the largest tree: they are those of the trees themselves."""
    gen, b, topk, depth = torch.Generator().manual_seed(2), 7, 4, 4
    rows = 1 + (depth - 1) * topk
    table = new_table(b, rows * topk)
    tokens = torch.arange(topk).expand(b, rows, topk)
    grow_levels(table, depth, topk, torch.randn(b, rows, topk, generator=gen).log_softmax(-1), tokens)
    p = torch.rand(V, generator=gen).softmax(-1)
    roots = torch.zeros(b, dtype=torch.int64)

    def reached(nodes: int) -> Tensor:
        return reach_probabilities(select_tree(table, roots, nodes), p.expand(b, nodes, V))

    found = by_nodes(reached(NODES[-1]), table)
    for i, nodes in enumerate(NODES):
        torch.testing.assert_close(found[:, i], reached(nodes).sum(1))
