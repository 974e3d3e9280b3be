"""Drafting trees with a head on torch: level by level; every node attends to its own ancestors.

A P-EAGLE head and a block drafter read mask tokens instead of their own drafts, so one pass gives the states of every
level, which all nodes of a level share; and so they share its distribution, where no Markov head adds to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.propose import MAX_TOP_M, SHARPNESS, propose
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree, Frontier, grow_level, new_table, select_tree
from eagle_plugin.heads.draft_head import DraftHead, Roots
from eagle_plugin.heads.layers import KeyValues

SPARE = 16  # candidates beyond k, which show whether equal logits are on both sides of the cut


class HeadPrefill(NamedTuple):
    """What a head has of a text of n + 1 tokens: row j of an EAGLE head read token j + 1 and the target's feature of
    token j, row j of a block drafter that feature alone."""

    tokens: Tensor  # [n + 1] int64
    states: Tensor  # [n, H]
    past: list[KeyValues]  # of the n rows, one per layer


def prefill_head(head: DraftHead, tokens: list[int], features: Tensor) -> HeadPrefill:
    """Run the head over a text; features [len(tokens) - 1 or more, F] are the target's."""
    text = torch.tensor(tokens, device=head.embedding.device)
    return HeadPrefill(text, *head.read_text(text[1:], features[: len(tokens) - 1]))


def draft_trees(
    head: DraftHead,
    tokens: list[int],
    prefill: HeadPrefill,
    roots: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    shape: Shape,
) -> DraftTree:
    """Draft b trees at different places of one text: each level has the children of the best topk nodes before it.

    roots [b] int64, 1 or more: positions in tokens; nothing of the text after its root is used for a tree. params and
    rng_keys [b] int64: of b requests, as for `core.propose.propose`; greedy ones do not read their key.
    shape.width: 2..64.
    """
    table = draft_candidates(head, tokens, prefill, roots, params, rng_keys, shape)
    return select_tree(table, torch.tensor(tokens, device=roots.device)[roots], shape.width)


def draft_candidates(
    head: DraftHead,
    tokens: list[int],
    prefill: HeadPrefill,
    roots: Tensor,
    params: SamplingParams,
    rng_keys: Tensor,
    shape: Shape,
    sharpness: float = SHARPNESS,
) -> CandidateTable:
    """All candidates of the trees of `draft_trees`, before the selection."""
    steps, topk, _ = shape
    b = len(roots)
    draft_to_target = head.to_target(torch.arange(len(head.d2t), device=roots.device))
    tail = DraftTail(head, prefill, roots, steps)
    table = new_table(b, topk + (steps - 1) * topk * topk, roots.device)
    frontier: Frontier | None = None
    offset = 0
    for level in range(1, steps + 1):
        logits = tail.logits(frontier, level)
        rows = logits.shape[1]
        logits = logits.view(b * rows, -1)
        scores, children = propose(
            *topk_log_probs(logits, min(MAX_TOP_M, logits.shape[1])),
            params.for_rows(rows),
            rng_keys.repeat_interleave(rows),
            (roots + level - 1).repeat_interleave(rows),  # of the nodes whose children these are
            topk,
            draft_to_target,
            sharpness,
        )
        scores, children = (values.view(b, rows, topk) for values in (scores, children))
        frontier = grow_level(table, offset, level, scores, children, frontier, topk if level < steps else 0)
        offset += rows * topk
    return table


class DraftTail:
    """The head's states after b roots of one text, level after level.

    Draft rows come after the text's n rows: slot n + (level - 1) * topk + j holds node j of a level's frontier.
    """

    def __init__(self, head: DraftHead, prefill: HeadPrefill, roots: Tensor, steps: int) -> None:
        self.head, self.n = head, len(prefill.states)
        self.past = [KeyValues(*(x.expand(len(roots), *x.shape) for x in layer)) for layer in prefill.past]
        self.current = prefill.states[roots - 1][:, None]  # [b, rows, H] of the nodes whose children come next
        self.roots = Roots(prefill.tokens[roots], roots, self.current, self.past)
        self.levels = head.list_levels(self.roots, steps)

    def states(self, frontier: Frontier | None, level: int) -> Tensor:
        """The states [b, rows, H] from which a level's nodes are drafted; frontier: the nodes before, None at level 1.

        Must be called for level 1, 2, ... in this order.
        """
        if self.levels is not None:
            return self.levels[:, level - 1, None].expand(-1, 1 if frontier is None else frontier.tokens.shape[1], -1)
        if frontier is None:
            return self.current
        return self._read_frontier(self.head, frontier, level)

    def logits(self, frontier: Frontier | None, level: int) -> Tensor:
        """The logits [b, rows, draft vocabulary] of a level's nodes; called as `states`, in its place."""
        tokens = self.roots.tokens[:, None] if frontier is None else frontier.tokens
        return self.head.logits_after(self.states(frontier, level), tokens)

    def _read_frontier(self, head: DraftHead, frontier: Frontier, level: int) -> Tensor:
        """Run the head on the level before: each node attends to the rows up to its root, its ancestors and itself."""
        b, rows = frontier.tokens.shape
        slots = torch.arange(self.past[0].keys.shape[-3] + rows - self.n, device=frontier.tokens.device)
        own = (frontier.ancestors[:, :, None] >> slots & 1).bool()  # [b, rows, slots]
        hidden = self.current.gather(1, frontier.parent_rows[:, :, None].expand(b, rows, self.current.shape[-1]))
        positions = (self.roots.positions + level - 2)[:, None].expand(b, rows)  # the root's row is root - 1
        visible = torch.cat([head.visible_text(self.roots, positions), own], -1)
        self.current, self.past = head(head.embed(frontier.tokens), hidden, positions, visible, self.past)
        return self.current


def topk_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The result of `core.tree.topk_log_softmax`, without sorting the whole vocabulary.

    logits [R, V] float -> (logp [R, k] float32, index [R, k] int64), descending, equal logits by ascending index.
    """
    x = logits.float()
    x = torch.where(x.isnan(), -torch.inf, x)
    m = min(k + SPARE, x.shape[1])
    values, index = x.topk(m, dim=1)
    index, order = index.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    index = index.gather(1, order)
    if m < x.shape[1]:
        cut = (values[:, k - 1] == values[:, -1]).nonzero()[:, 0]  # more tokens may be as likely as the last one
        whole = x[cut].sort(dim=1, descending=True, stable=True)
        values[cut], index[cut] = whole.values[:, :m], whole.indices[:, :m]
    logp = values[:, :k] - x.logsumexp(dim=1, keepdim=True)
    return torch.where(logp.isnan(), -torch.inf, logp).clamp(max=0), index[:, :k].contiguous()
