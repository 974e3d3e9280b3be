"""The random numbers of a round, and trees that hold no draft."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core.policy import NUM_SAMPLED
from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.kernels.sampling import Proposals, uniforms

# Sequences of random numbers that one (request, position) gives; they never share a number.
DRAFT, VERIFY, PREFILL = range(3)


def draft_numbers(keys: Tensor, counters: Tensor, shape: Shape) -> Tensor:
    """Random numbers for the sampled children of P proposal rows, the root's first; [b, P, S] float64.

    keys and counters [b] int64: one key a request, and its committed length.
    """
    rows = 1 + shape.draft_slots
    return uniforms(keys, counters, DRAFT, rows * NUM_SAMPLED).view(-1, rows, NUM_SAMPLED)


def verify_numbers(keys: Tensor, counters: Tensor, max_accept_length: int) -> Tensor:
    """Random numbers for the walk: S tests and a draw at each node of a path of E; [b, E, S + 1] float64."""
    return uniforms(keys, counters, VERIFY, max_accept_length * (NUM_SAMPLED + 1)).view(
        -1, max_accept_length, NUM_SAMPLED + 1
    )


def fresh_keys(b: int, device: torch.device | str = "cpu") -> Tensor:
    """64 new random bits for each of b requests, [b] int64."""
    return torch.randint(-(2**63), 2**63 - 1, (b,), device=device)


def root_tree(tokens: Tensor) -> DraftTree:
    """Trees [b, 1] of nothing but the root; tokens [b]."""
    roots = tokens.long()[:, None]
    none = torch.full_like(roots, -1, dtype=torch.int32)
    return DraftTree(roots, none, torch.zeros_like(none), torch.ones_like(roots), none)


def no_proposals(b: int, device: torch.device | str = "cpu") -> Proposals:
    """The proposals of b trees without sampled children."""
    return Proposals(torch.empty(b, 0, 0, dtype=torch.int64, device=device), torch.empty(b, 0, 0, device=device))
