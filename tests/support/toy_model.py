"""A target and a draft head small enough to enumerate, decoded with draft trees, many requests at once.

Contexts are the tokens so far, at most LENGTH of them; p and q of every context are fixed random rows. The functions
that draft and verify are arguments, so that broken ones can take their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import scipy.stats
import torch
from torch import Tensor

from eagle_plugin.core.sampling import SamplingParams, target_distribution
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import sampling
from eagle_plugin.kernels.tree import grow_level, new_table, select_tree

VOCABULARY, LENGTH = 6, 3  # target tokens; tokens that a request generates
DRAFTABLE = torch.tensor([4, 0, 5, 2, 1])  # draft vocabulary to target ids: token 3 cannot be drafted
STEPS, TOPK, WIDTH = 3, 3, 9  # of the draft trees

Propose = Callable[..., tuple[Tensor, Tensor]]
Verify = Callable[[DraftTree, Tensor, SamplingParams, Tensor, Tensor, int], Accepted]


class Toy(NamedTuple):
    """Logits of every context; a context is a number in base VOCABULARY with a leading 1."""

    target: Tensor  # [contexts, VOCABULARY] float32
    head: Tensor  # [contexts, len(DRAFTABLE)] float32


def make_toy(seed: int) -> Toy:
    gen = torch.Generator().manual_seed(seed)
    contexts = 2 * VOCABULARY ** (LENGTH + STEPS + 1)
    target = 1.5 * torch.randn(contexts, VOCABULARY, generator=gen)
    head = target[:, DRAFTABLE] + 0.8 * torch.randn(contexts, len(DRAFTABLE), generator=gen)
    return Toy(target, head)


def draft(toy: Toy, contexts: Tensor, params: SamplingParams, keys: Tensor, lengths: Tensor, propose: Propose):
    """Draft one tree per context, WIDTH - 1 of all the candidates, after so many tokens [n]."""
    n = len(contexts)
    table = new_table(n, TOPK + (STEPS - 1) * TOPK * TOPK)
    frontier, rows, first, at = None, 1, 0, contexts[:, None]
    for level in range(1, STEPS + 1):
        logp, index = toy.head[at.reshape(-1)].log_softmax(-1).sort(dim=1, descending=True)
        places = (lengths + level - 1).repeat_interleave(rows)
        children = propose(logp, index, params.for_rows(rows), keys.repeat_interleave(rows), places, TOPK, DRAFTABLE)
        logp, tokens = (values.view(n, rows, TOPK) for values in children)
        frontier = grow_level(table, first * TOPK, level, logp, tokens, frontier, TOPK if level < STEPS else 0)
        at = at.gather(1, frontier.parent_rows) * VOCABULARY + frontier.tokens
        first, rows = first + rows, TOPK
    return select_tree(table, torch.zeros(n, dtype=torch.int64), WIDTH)


def node_contexts(tree: DraftTree, contexts: Tensor) -> Tensor:
    """The context after each node, [n, W]."""
    at = contexts[:, None].repeat(1, WIDTH)
    for node in range(1, WIDTH):
        parent = tree.parents[:, node : node + 1].clamp(min=0).long()
        at[:, node : node + 1] = at.gather(1, parent) * VOCABULARY + tree.tokens[:, node : node + 1]
    return at


def decode(
    toy: Toy,
    n: int,
    params: SamplingParams,
    *,
    propose: Propose = sampling.propose,
    verify: Verify = sampling.verify_tree,
    seed: int = 0,
) -> tuple[Tensor, float]:
    """Decode n requests of LENGTH tokens; returns the tokens [n, LENGTH] and the mean accept length of first rounds."""
    keys = torch.randint(2**62, (n,), generator=torch.Generator().manual_seed(seed))
    contexts, produced = torch.ones(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    first_lengths = 0.0
    for round_number in range(LENGTH):  # every round yields a token
        live = (produced < LENGTH).nonzero()[:, 0]
        if not len(live):
            break
        given = params.rows(live), keys[live], produced[live]
        tree = draft(toy, contexts[live], *given, propose)
        logits = toy.target[node_contexts(tree, contexts[live]).view(-1)]
        accepted = verify(tree, logits, *given, STEPS + 1)
        if round_number == 0:
            first_lengths = accepted.lengths.float().mean().item()
        for j in range(STEPS + 1):
            take = (j < accepted.lengths) & (produced[live] < LENGTH)
            at = live[take]
            contexts[at] = contexts[at] * VOCABULARY + accepted.tokens[take, j]
            produced[at] += 1
    digits = [contexts // VOCABULARY**j % VOCABULARY for j in reversed(range(LENGTH))]
    return torch.stack(digits, dim=1), first_lengths


def exact_joint(toy: Toy, params: SamplingParams) -> Tensor:
    """The probability of every sequence of LENGTH tokens under the target alone, by enumeration."""
    row = params.rows(slice(1))
    probabilities = []
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        context, p = 1, 1.0
        for token in tokens:
            p *= float(target_distribution(toy.target[context][None], row)[0, token])
            context = context * VOCABULARY + token
        probabilities.append(p)
    return torch.tensor(probabilities, dtype=torch.float64)


def p_value(tokens: Tensor, joint: Tensor) -> float:
    """Chi-square of the sequences against the exact joint distribution; cells that expect fewer than 5 are pooled."""
    cells = sum(tokens[:, j] * VOCABULARY ** (LENGTH - 1 - j) for j in range(LENGTH))
    seen, wanted = torch.bincount(cells, minlength=len(joint)).double(), joint * len(tokens)
    if bool((seen[joint == 0] > 0).any()):
        return 0.0  # a sequence that the target never emits
    large = wanted >= 5
    seen = torch.cat([seen[large], seen[~large].sum()[None]])
    wanted = torch.cat([wanted[large], wanted[~large].sum()[None]])
    if wanted[-1] < 5:  # too few for a cell of its own
        seen[-2], wanted[-2] = seen[-2] + seen[-1], wanted[-2] + wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    statistic = ((seen - wanted) ** 2 / wanted).sum().item()
    return float(scipy.stats.chi2.sf(statistic, len(seen) - 1)) if len(seen) > 1 else 1.0
