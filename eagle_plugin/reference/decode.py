"""Greedy decoding of one sequence on a transformers causal language model, plain and with a draft tree.

Nothing is cached between forwards of the target, and the head is run over the whole sequence again each round: what a
round computes depends on nothing but the tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.tree import (
    CandidateTable,
    DraftTree,
    Frontier,
    grow_level,
    new_table,
    select_tree,
    topk_log_softmax,
)
from eagle_plugin.core.verify import Accepted, verify_greedy
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.layers import DraftHead, KeyValues


class Decoded(NamedTuple):
    """New tokens and the accept length (with the bonus token) of every round."""

    tokens: list[int]
    accept_lengths: list[int]


def load_head(model: Any, target_dir: str | Path, head_dir: str | Path, *, algorithm: str) -> DraftHead:
    """Check the head in head_dir against its target and load it in the model's dtype, sharing the model's embedding.

    Raises:
        HeadError: the head does not fit the target.
    """
    info = check_head(target_dir, head_dir, algorithm=algorithm)
    embedding, lm_head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    if info.algorithm == "EAGLE":
        return Eagle2Head.load(head_dir, embedding, lm_head, embedding.dtype)
    return Eagle3Head.load(head_dir, info.aux_layer_ids, embedding, lm_head, embedding.dtype)


@torch.no_grad()
def plain_greedy(model: Any, ids: list[int], n: int) -> list[int]:
    """Return the n tokens that the target itself chooses after ids."""
    tokens = list(ids)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


@torch.no_grad()
def speculative_greedy(
    model: Any,
    head: DraftHead,
    ids: list[int],
    n: int,
    *,
    steps: int,
    topk: int,
    draft_tokens: int,
    verify: Callable[[Tensor, Tensor, Tensor, int], Accepted] = verify_greedy,
) -> Decoded:
    """Return n tokens after ids, drafted by the head and verified by the target.

    steps, topk and draft_tokens are the engine's flags: levels of the draft tree, children per node and nodes kept per
    level, nodes verified with the root (2..64). topk = 1 with draft_tokens = steps + 1 is a chain.
    """
    tokens = [*ids, *plain_greedy(model, ids, 1)]
    accept_lengths = []
    while len(tokens) < len(ids) + n:
        tree = draft_tree(model, head, tokens, steps=steps, topk=topk, draft_tokens=draft_tokens)
        accepted = verify(tree.tokens, tree.parents, target_choices(model, tokens, tree), steps + 1)
        length = int(accepted.lengths[0])
        tokens += accepted.tokens[0, :length].tolist()
        accept_lengths.append(length)
    return Decoded(tokens[len(ids) : len(ids) + n], accept_lengths)


def target_features(model: Any, head: DraftHead, tokens: list[int]) -> Tensor:
    """What the head reads of the target: [len(tokens), F], its last hidden state or the input of the aux layers."""
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # states[i] is the input of layer i, and states[-1] the output after the final norm
    return torch.cat([states[i][0] for i in head.aux_layers or (-1,)], -1)


def draft_tree(
    model: Any, head: DraftHead, tokens: list[int], *, steps: int, topk: int, draft_tokens: int
) -> DraftTree:
    """Draft a tree behind tokens[-1], the root: `steps` levels, each the children of the best topk nodes before.

    The last token has not been read by the target yet. Draft rows stand behind the L = len(tokens) - 1 verified rows:
    slot t = (level - 1) * topk + j holds node j of a level's frontier.
    """
    L = len(tokens) - 1
    hidden = head.fuse(target_features(model, head, tokens[:-1]))
    causal = torch.ones(L, L, dtype=torch.bool).tril()
    states, past = head(head.embed(torch.tensor(tokens[1:])), hidden, torch.arange(L), causal)
    parents = states[-1:]  # [rows, H], state of the nodes whose children come next; first the root

    table = new_table(1, topk + (steps - 1) * topk * topk)
    frontier: Frontier | None = None
    offset = 0
    for level in range(1, steps + 1):
        if frontier is not None:
            parents, past = _read_frontier(head, frontier, parents, past, L, level)
        frontier = _propose(head, table, offset, level, parents, frontier, topk)
        offset += parents.shape[0] * topk
    return select_tree(table, torch.tensor(tokens[-1:]), draft_tokens)


def _propose(
    head: DraftHead,
    table: CandidateTable,
    offset: int,
    level: int,
    parents: Tensor,
    frontier: Frontier | None,
    topk: int,
) -> Frontier:
    logp, children = topk_log_softmax(head.logits(parents), topk)
    return grow_level(table, offset, level, logp[None], head.to_target(children)[None], frontier, topk)


def _read_frontier(
    head: DraftHead, frontier: Frontier, parents: Tensor, past: list[KeyValues], L: int, level: int
) -> tuple[Tensor, list[KeyValues]]:
    """Run the head on the nodes of the level before: each sees the verified rows, its own ancestors and itself."""
    rows = frontier.tokens.shape[1]
    slots = torch.arange(past[0].keys.shape[-3] + rows - L)
    own = (frontier.ancestors[0][:, None] >> slots) & 1
    visible = torch.cat([torch.ones(rows, L, dtype=torch.bool), own.bool()], 1)
    hidden = parents[frontier.parent_rows[0]]
    positions = torch.full((rows,), L + level - 2)  # the root's row is L - 1; nodes of level d stand at L + d - 1
    return head(head.embed(frontier.tokens[0]), hidden, positions, visible, past)


def target_choices(model: Any, tokens: list[int], tree: DraftTree) -> Tensor:
    """The target's next token after each node [1, W] int64: one forward a leaf over the tokens and the leaf's path."""
    parents = tree.parents[0].tolist()
    choices = torch.zeros_like(tree.tokens)
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        if path[0] != 0:
            continue  # padding
        logits = model(torch.tensor([tokens[:-1] + tree.tokens[0, path].tolist()])).logits[0]
        choices[0, path] = logits[-len(path) :].argmax(-1)
    return choices
