"""Decoding of one sequence on a transformers causal language model, plain and with a draft tree, greedy and sampled.

Nothing is cached between forwards of the target, and the head is run over the whole sequence again each round. So the
result of a round depends on the tokens so far and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted, verify_greedy, verify_tree
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.interpretations import read_interpretations
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.reference.draft import draft_trees, prefill_head
from eagle_plugin.learning.reference.target import path_logits, target_features


def served_head(
    target: str | Path, head: str | Path, algorithm: str = "EAGLE3", dtype: torch.dtype | None = None
) -> DraftHead:
    """The head with the aux layers that SGLang captures for it. Raises HeadError where it does not fit."""
    layers = check_head(target, head, algorithm=algorithm).aux_layer_ids
    served = next(found for found in read_interpretations(head, target) if found.aux_layers == layers)
    return load_any_head(head, target, dtype, served)


class Decoded(NamedTuple):
    """New tokens and the accept length (with the bonus token) of every round."""

    tokens: list[int]
    accept_lengths: list[int]


def draft_tree(
    model: Any, head: DraftHead, tokens: list[int], params: SamplingParams, rng_keys: Tensor, shape: Shape
) -> DraftTree:
    """Draft one tree after tokens[-1], the root, which the target has not read yet; see `draft_trees` with b = 1."""
    prefill = prefill_head(head, tokens, target_features(model, head, tokens[:-1]))
    roots = torch.tensor([len(tokens) - 1], device=head.embedding.device)
    return draft_trees(head, tokens, prefill, roots, params, rng_keys, shape)


@torch.no_grad()
def plain_greedy(model: Any, ids: list[int], n: int) -> list[int]:
    """Return the n tokens that the target chooses after ids."""
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
    shape: Shape,
    *,
    verify: Callable[[Tensor, Tensor, Tensor, int], Accepted] = verify_greedy,
) -> Decoded:
    """Return n tokens after ids, drafted by the head and verified by the target.

    shape.width: 2..64.
    """
    params, unread = SamplingParams.greedy(1), torch.zeros(1, dtype=torch.int64)
    tokens = [*ids, *plain_greedy(model, ids, 1)]
    accept_lengths = []
    while len(tokens) < len(ids) + n:
        tree = draft_tree(model, head, tokens, params, unread, shape)
        choices = path_logits(model, tokens, tree).argmax(-1)[None]
        accepted = verify(tree.tokens, tree.parents, choices, shape.steps + 1)
        length = int(accepted.lengths[0])
        tokens += accepted.tokens[0, :length].tolist()
        accept_lengths.append(length)
    return Decoded(tokens[len(ids) : len(ids) + n], accept_lengths)


@torch.no_grad()
def speculative_sample(
    model: Any,
    head: DraftHead,
    ids: list[int],
    n: int,
    params: SamplingParams,
    rng_keys: Tensor,
    shape: Shape,
    *,
    verify: Callable[[DraftTree, Tensor, SamplingParams, Tensor, Tensor, int], Accepted] = verify_tree,
) -> Decoded:
    """Return n tokens after ids with the distribution of plain sampling; params and rng_keys [1] int64 of one request.

    The tokens are a function of ids, params and the key: those that `core.gumbel.draw_tokens` draws after each
    position, whatever is drafted. Greedy params give the tokens of `speculative_greedy`. The rest as there.
    """
    logits = model(torch.tensor([ids])).logits[0, -1:].float()
    tokens = [*ids, int(draw_tokens(logits, params, rng_keys, torch.tensor([len(ids) - 1])))]
    accept_lengths = []
    while len(tokens) < len(ids) + n:
        tree = draft_tree(model, head, tokens, params, rng_keys, shape)
        logits, root = path_logits(model, tokens, tree).float(), torch.tensor([len(tokens) - 1])
        accepted = verify(tree, logits, params, rng_keys, root, shape.steps + 1)
        length = int(accepted.lengths[0])
        tokens += accepted.tokens[0, :length].tolist()
        accept_lengths.append(length)
    return Decoded(tokens[len(ids) : len(ids) + n], accept_lengths)
