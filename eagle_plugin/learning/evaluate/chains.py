"""Chains at temperature > 0: one sampled draft per step, verified by speculative sampling (arXiv 2211.17192)."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree, Frontier
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.reference.draft import DraftTail, HeadPrefill


def sample_chains(
    head: DraftHead, prefill: HeadPrefill, roots: Tensor, temperature: float, gen: torch.Generator, steps: int
) -> tuple[Tensor, Tensor]:
    """Draw a chain of drafts after each of b roots of one text.

    roots [b] int64 as for `draft_trees` -> draft ids [b, steps] int64 and q [b, steps, draft vocabulary] float32, the
    whole distribution of the head at this temperature from which each was drawn.
    """
    tail = DraftTail(head, prefill, roots, steps)
    frontier: Frontier | None = None
    drafts, q = [], []
    for level in range(1, steps + 1):
        logits = tail.logits(frontier, level)[:, 0].float()
        q.append((logits / temperature).softmax(-1))
        drafts.append(torch.multinomial(q[-1].to(gen.device), 1, generator=gen).to(roots.device))
        frontier = _follow(head.to_target(drafts[-1]), level)
    return torch.cat(drafts, 1), torch.stack(q, 1)


def forced_likelihoods(head: DraftHead, tokens: list[int], prefill: HeadPrefill, roots: Tensor, steps: int) -> Tensor:
    """The head's log q [b, steps] float32 of the next `steps` tokens of a text that is given to it.

    roots [b] int64, at most len(tokens) - 1 - steps. NaN where the token is not in the draft vocabulary.
    """
    text = torch.tensor(tokens, device=roots.device)
    to_draft = torch.full((len(head.embedding),), -1, device=roots.device)
    draft_ids = torch.arange(len(head.d2t), device=roots.device)
    to_draft[head.to_target(draft_ids)] = draft_ids
    tail = DraftTail(head, prefill, roots, steps)
    frontier: Frontier | None = None
    found = []
    for level in range(1, steps + 1):
        logq = tail.logits(frontier, level)[:, 0].float().log_softmax(-1)
        following = text[roots + level]
        ids = to_draft[following][:, None]
        found.append(torch.where(ids >= 0, logq.gather(1, ids.clamp(min=0)), torch.nan))
        frontier = _follow(following[:, None], level)
    return torch.cat(found, 1)


def _follow(tokens: Tensor, level: int) -> Frontier:
    """The frontier of a chain: one node per level, tokens [b, 1] int64, which attends to all nodes before it."""
    zeros = torch.zeros_like(tokens)
    return Frontier(zeros.int(), zeros.float(), tokens, zeros, torch.full_like(zeros, (1 << level) - 1))


def chain_acceptance(p: Tensor, drafts: Tensor, q: Tensor, to_target: Tensor) -> Tensor:
    """The probability [b, steps] that k drafts or more are accepted, k = 1..steps.

    p [b, steps, V]: the target's distribution before each draft; drafts and q as `sample_chains` returns them;
    to_target [draft vocabulary] int64. A draft x is accepted with probability min(1, p(x) / q(x)); for the last of k
    drafts the mean over x, sum of min(p, q), replaces its draw.
    """
    p = p[:, :, to_target]
    mean = torch.minimum(p, q).sum(-1)
    p_drawn, q_drawn = (x.gather(2, drafts[:, :, None])[:, :, 0] for x in (p, q))
    before = (p_drawn / q_drawn).clamp(max=1).cumprod(1)[:, :-1]
    return (torch.cat([torch.ones_like(before[:, :1]), before], 1) * mean).double()


def graft_chains(trees: DraftTree, tokens: Tensor) -> DraftTree:
    """The trees with one more chain at each root, so that the target reads both in one forward.

    tokens [b, n] int64, target ids: node W is the first of the chain.
    """
    b, W = trees.tokens.shape
    n = tokens.shape[1]
    steps = torch.arange(n, device=tokens.device)
    parents = torch.where(steps == 0, 0, W + steps - 1).int().expand(b, n)
    ancestors = (((2 << steps) - 1) << W | 1).expand(b, n)
    return DraftTree(
        torch.cat([trees.tokens, tokens], 1),
        torch.cat([trees.parents, parents], 1),
        torch.cat([trees.depths, (steps + 1).int().expand(b, n)], 1),
        torch.cat([trees.ancestors, ancestors], 1),
    )
