"""Drafting trees with a head on torch: level by level, every node attending to its own ancestors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.propose import Proposals
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree, Frontier, grow_level, new_table, select_tree, topk_log_softmax
from eagle_plugin.heads.layers import DraftHead, KeyValues
from eagle_plugin.reference.rules import Rule
from eagle_plugin.reference.target import target_features


class Reading(NamedTuple):
    """What the head made of a text of n + 1 tokens: row j read token j + 1 and the target's feature of token j."""

    states: Tensor  # [n, H]
    past: list[KeyValues]  # of the n rows, a layer


def read_text(head: DraftHead, tokens: list[int], features: Tensor) -> Reading:
    """Run the head over a text; features [len(tokens) - 1 or more, F] are the target's."""
    n = len(tokens) - 1
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    return Reading(*head(head.embed(torch.tensor(tokens[1:])), head.fuse(features[:n]), torch.arange(n), causal))


def draft_tree(
    model: Any,
    head: DraftHead,
    tokens: list[int],
    rule: Rule,
    params: SamplingParams,
    gen: torch.Generator,
    *,
    steps: int,
    topk: int,
    draft_tokens: int,
) -> tuple[DraftTree, Proposals]:
    """Draft one tree behind tokens[-1], the root, which the target has not read yet; see `draft_trees`."""
    reading = read_text(head, tokens, target_features(model, head, tokens[:-1]))
    roots = torch.tensor([len(tokens) - 1])
    return draft_trees(
        head, tokens, reading, roots, rule, params, gen, steps=steps, topk=topk, draft_tokens=draft_tokens
    )


def draft_trees(
    head: DraftHead,
    tokens: list[int],
    reading: Reading,
    roots: Tensor,
    rule: Rule,
    params: SamplingParams,
    gen: torch.Generator,
    *,
    steps: int,
    topk: int,
    draft_tokens: int,
) -> tuple[DraftTree, Proposals]:
    """Draft b trees at different places of one text: `steps` levels, each the children of the best topk nodes before.

    roots [b] int64, 1 or more: positions in tokens; a tree knows nothing of the text behind its root. params of b
    requests. steps, topk and draft_tokens (the root included, 2..64) are the engine's flags. Draft rows stand behind
    the text's n rows: slot n + (level - 1) * topk + j holds node j of a level's frontier.
    """
    b, k = len(roots), rule.children(topk)
    draft_to_target = head.to_target(torch.arange(len(head.d2t)))
    states = reading.states[roots - 1][:, None]  # [b, rows, H] of the nodes whose children come next; first the root
    past = [KeyValues(*(x.expand(b, *x.shape) for x in layer)) for layer in reading.past]
    table = new_table(b, k + (steps - 1) * topk * k)
    proposals: list[Proposals] = []
    frontier: Frontier | None = None
    offset = first_row = 0
    for level in range(1, steps + 1):
        if frontier is not None:
            states, past = _read_frontier(head, frontier, states, past, roots, len(reading.states), level)
        rows = states.shape[1]
        logits = head.logits(states).view(b * rows, -1)
        children = rule.propose(
            *topk_log_softmax(logits, min(rule.listed, logits.shape[1])),
            params.for_rows(rows),
            gen,
            topk,
            first_row=first_row,
            rows_per_request=rows,
            draft_to_target=draft_to_target,
        )
        proposals.append(Proposals(children.q_tokens.view(b, rows, -1), children.q_weights.view(b, rows, -1)))
        logp, chosen, draws = (values.view(b, rows, k) for values in children[:3])
        frontier = grow_level(table, offset, level, logp, chosen, frontier, topk if level < steps else 0, draws)
        offset, first_row = offset + rows * k, first_row + rows
    tree = select_tree(table, torch.tensor(tokens)[roots], draft_tokens)
    return tree, Proposals(*(torch.cat(parts, dim=1) for parts in zip(*proposals, strict=True)))


def _read_frontier(
    head: DraftHead, frontier: Frontier, parents: Tensor, past: list[KeyValues], roots: Tensor, n: int, level: int
) -> tuple[Tensor, list[KeyValues]]:
    """Run the head on the level before: each node sees the rows up to its root, its own ancestors and itself."""
    b, rows = frontier.tokens.shape
    slots = torch.arange(past[0].keys.shape[-3] + rows - n)
    own = (frontier.ancestors[:, :, None] >> slots & 1).bool()  # [b, rows, slots]
    text = (torch.arange(n) < roots[:, None])[:, None].expand(b, rows, n)
    hidden = parents.gather(1, frontier.parent_rows[:, :, None].expand(b, rows, parents.shape[-1]))
    positions = (roots + level - 2)[:, None].expand(b, rows)  # the root's row is root - 1
    return head(head.embed(frontier.tokens), hidden, positions, torch.cat([text, own], -1), past)
