"""The accept length of trees and of chains of as many nodes, with the same head at the same contexts.

A tree of N nodes (the root included) should accept no less than a chain of N nodes. Chains are those that engines
draft: at temperature 0 the most likely tokens; above it tokens drawn from the head's distribution, verified token by
token (Leviathan et al., arXiv 2211.17192) or in one block (Sun et al., arXiv 2403.10444).

The trees of one context are cut from one table of candidates: a smaller one is the best part of a larger one. Where
children are drawn, the values are averages over the verification; with shared noise (`core.gumbel`) a tree and its
noise give one path, so that a value varies more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree, select_tree
from eagle_plugin.core.verify import verify_greedy
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.evaluate.acceptance import expected_accept_length, reach_probabilities
from eagle_plugin.learning.reference.draft import HeadPrefill, draft_candidates
from eagle_plugin.learning.reference.rules import RULES, Rule, gumbel
from eagle_plugin.learning.reference.target import tree_logits

NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
TREE = Shape(16, 4, NODES[-1])
CHAIN = Shape.chain(NODES[-1] - 1)


class Contexts(NamedTuple):
    """Places of one text from which trees are drafted."""

    model: Any
    head: DraftHead
    tokens: list[int]
    prefill: HeadPrefill
    roots: Tensor  # [contexts] int64
    temperature: float

    def table(self, rule: Rule, shape: Shape, gen: torch.Generator) -> tuple[CandidateTable, Any]:
        """Candidates of one tree per context, and the distributions that they were drawn from."""
        return draft_candidates(self.head, self.tokens, self.prefill, self.roots, rule, self.params, gen, shape)

    def tree(self, table: CandidateTable, nodes: int) -> DraftTree:
        """The trees of so many nodes."""
        return select_tree(table, torch.tensor(self.tokens)[self.roots], nodes)

    def logits(self, trees: DraftTree) -> Tensor:
        """The target's [contexts, W, V] float32 after their nodes."""
        return tree_logits(self.model, self.tokens, self.roots, trees).float()

    @property
    def params(self) -> SamplingParams:
        """Of each context."""
        return SamplingParams.of(len(self.roots), self.temperature)


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) [..., V] float32; at temperature 0 all of it on the argmax."""
    if temperature:
        return (logits.float() / temperature).softmax(-1)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


Lengths = dict[int, Tensor]  # accept lengths [contexts] float64, by nodes
Measure = Callable[[Contexts, torch.Generator], Lengths]


def places_of(table: CandidateTable, nodes: int, of: int) -> Tensor:
    """The nodes [contexts, nodes] that a tree of so many nodes has in the one of `of` nodes."""
    order = table.scores.sort(dim=-1, descending=True, stable=True).indices
    small, large = (order[:, : n - 1].sort(dim=1).values for n in (nodes, of))
    return torch.nn.functional.pad(torch.searchsorted(large, small) + 1, (1, 0))


def drawn_trees(rule: Rule) -> Measure:
    """Of trees under one of `RULES`."""

    def measure(contexts: Contexts, gen: torch.Generator) -> Lengths:
        table, proposals = contexts.table(rule, TREE, gen)
        p = distribution(contexts.logits(contexts.tree(table, TREE.width)), contexts.temperature)
        found = {}
        for nodes in NODES:
            at = places_of(table, nodes, TREE.width)[:, :, None].expand(-1, -1, p.shape[2])
            found[nodes] = expected_accept_length(contexts.tree(table, nodes), p.gather(1, at), proposals)
        return found

    return measure


def coupled_trees(sharpness: float) -> Measure:
    """Of trees whose draft shares the target's noise."""

    def measure(contexts: Contexts, gen: torch.Generator) -> Lengths:
        keys = torch.randint(2**62, (len(contexts.roots),), generator=gen)
        table, _ = contexts.table(gumbel(keys, sharpness), TREE, gen)
        trees = contexts.tree(table, TREE.width)
        width = TREE.width
        drawn = draw_tokens(
            contexts.logits(trees).flatten(0, 1), contexts.params.for_rows(width), keys.repeat_interleave(width),
            (contexts.roots[:, None] + trees.depths).flatten(),
        ).view(-1, width)  # fmt: skip
        found = {}
        for nodes in NODES:
            tree, at = contexts.tree(table, nodes), places_of(table, nodes, width)
            accepted = verify_greedy(tree.tokens, tree.parents, drawn.gather(1, at), nodes)
            found[nodes] = accepted.lengths.double()
        return found

    return measure


def chains(contexts: Contexts, gen: torch.Generator) -> dict[str, Lengths]:
    """Of chains: verified token by token, and above temperature 0 in one block too."""
    rule = RULES["recursive_rejection" if contexts.temperature else "target_only"]
    table, proposals = contexts.table(rule, CHAIN, gen)
    trees = contexts.tree(table, CHAIN.width)
    p = distribution(contexts.logits(trees), contexts.temperature)
    reached = reach_probabilities(trees, p, proposals).cumsum(dim=1)
    found = {"chain": {nodes: reached[:, nodes - 1] for nodes in NODES}}
    if contexts.temperature:
        found["chain, block"] = dict(block_lengths(trees.tokens[:, 1:], p.double(), proposals))
    return found


def block_lengths(drafts: Tensor, p: Tensor, proposals: Any) -> Iterator[tuple[int, Tensor]]:
    """The expected accept lengths of chains under block verification (arXiv 2403.10444, algorithm 2), by nodes.

    drafts [b, n] int64; p [b, n + 1, V]: the target's distribution after the root and after each draft.
    """
    b, n = drafts.shape
    tokens, q = proposals.tokens, proposals.weights.double()  # [b, n, M]; row j drew draft j
    ratio = torch.empty(b, n, dtype=torch.float64)
    for j in range(n):
        own = (tokens[:, j] == drafts[:, j, None]) & (q[:, j] > 0)
        ratio[:, j] = p[:, j].gather(1, drafts[:, j, None])[:, 0] / (q[:, j] * own).sum(1)
    kept = [torch.ones(b, dtype=torch.float64)]  # p_j of the paper
    for j in range(n):
        kept.append((kept[-1] * ratio[:, j]).clamp(max=1))
    inner = []  # h_j of a draft that is not the last one of its block
    for j in range(1, n):
        at = p[:, j].gather(1, tokens[:, j])
        above = (kept[j][:, None] * at - q[:, j]).clamp(min=0).sum(1) + kept[j] * (1 - at.sum(1)).clamp(min=0)
        inner.append(above / (above + 1 - kept[j]).clamp(min=1e-300))
    for nodes in NODES:
        last = nodes - 1
        stops = torch.stack([1 - h for h in [*inner[: last - 1], kept[last]]], dim=1)
        reached = 1 - stops.flip(1).cumprod(dim=1).flip(1)  # that a block of j drafts or more is accepted
        yield nodes, 1 + reached.sum(dim=1)


def chains_table(rows: list[dict[str, Any]]) -> Table:
    """Rows of `acceptance.py` as a table."""
    found = {(row["temperature"], row["nodes"], row["rule"]): row for row in rows}
    rules = dict.fromkeys(row["rule"] for row in rows)
    out = Table(title="accept length by nodes, the root included; in brackets: above the better chain's")
    for column in ("T", "nodes", *rules):
        out.add_column(column, justify="right")
    for temperature, nodes in dict.fromkeys((row["temperature"], row["nodes"]) for row in rows):
        of = [found.get((temperature, nodes, rule)) for rule in rules]
        out.add_row(f"{temperature:g}", str(nodes), *map(_cell, of), end_section=nodes == NODES[-1])
    return out


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    cell = f"{row['accept_length']:.3f} ±{row['accept_length_error']:.3f}"
    return cell + (f" ({row['of_chain']:+.3f} ±{row['of_chain_error']:.3f})" if "of_chain" in row else "")
