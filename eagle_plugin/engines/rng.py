"""The random numbers of a decode round: functions of a request's key and its committed length, in both engines.

A seeded request draws the same numbers whatever its batch, and no number is used twice: every round commits at least
one token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle_plugin.core.policy import NUM_SAMPLED
from eagle_plugin.core.shape import Shape
from eagle_plugin.kernels.sampling import uniforms

# Streams of one (key, committed length); they never share a number.
DRAFT, VERIFY, PREFILL = range(3)


def request_keys(b: int, seeds: Mapping[int, int], device: torch.device | str = "cpu") -> Tensor:
    """One key per request, [b] int64: its seed (modulo 2^64) where `seeds` has one, else 64 new random bits."""
    keys = torch.randint(-(2**63), 2**63 - 1, (b,), device=device)
    for i, seed in seeds.items():
        keys[i] = (seed + 2**63) % 2**64 - 2**63
    return keys


def draft_uniforms(keys: Tensor, lengths: Tensor, shape: Shape) -> Tensor:
    """Numbers for the sampled children of P proposal rows, the root's first; [b, P, S] float64 in [0, 1).

    keys [b] int64; lengths [b] int64: committed tokens, the root not counted.
    """
    rows = 1 + shape.draft_slots
    return uniforms(keys, lengths, DRAFT, rows * NUM_SAMPLED).view(-1, rows, NUM_SAMPLED)


def verify_uniforms(keys: Tensor, lengths: Tensor, max_accept_length: int) -> Tensor:
    """Numbers for the walk: S tests and a draw at each node of a path of E nodes; [b, E, S + 1] float64 in [0, 1)."""
    return uniforms(keys, lengths, VERIFY, max_accept_length * (NUM_SAMPLED + 1)).view(
        -1, max_accept_length, NUM_SAMPLED + 1
    )
