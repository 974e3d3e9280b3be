"""Counts steps by how far their predicted times are from the measured ones.

Counts of two moments can be subtracted, so that the median of any span of time is known without the times themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

# Errors |measured / predicted - 1|, the upper bounds of the classes; larger ones are in a class of their own.
BOUNDS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
CLASSES = len(BOUNDS) + 1


def class_of(measured: float, predicted: float) -> int:
    """The class of a step's error, 0 for the smallest; both in seconds, predicted > 0."""
    return bisect_left(BOUNDS, abs(measured / predicted - 1))


def cumulated(counts: Sequence[int]) -> dict[str, int]:
    """Steps by the largest error that they may have, as Prometheus writes it; none without counts."""
    labels = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
    return {label: sum(counts[: place + 1]) for place, label in enumerate(labels)} if counts else {}


def counts_of(cumulated_steps: Mapping[str, float]) -> tuple[int, ...]:
    """The inverse of `cumulated`. Raises KeyError where a class is missing."""
    if not cumulated_steps:
        return ()
    found = [int(cumulated_steps[label]) for label in cumulated([0] * CLASSES)]
    return tuple(now - before for now, before in zip(found, [0, *found], strict=False))


def added(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """What was counted since `before`, which is empty at the start."""
    return tuple(x - y for x, y in zip(now, before, strict=True)) if before else tuple(now)


def median_error(counts: Sequence[int]) -> float | None:
    """The median of |measured / predicted - 1|, linear within its class; None without steps.

    Of the class above all bounds only the bound is known: the median is this at least.
    """
    half, below = sum(counts) / 2, 0
    for place, count in enumerate(counts):
        if count and below + count >= half:
            low = BOUNDS[place - 1] if place else 0.0
            high = BOUNDS[min(place, len(BOUNDS) - 1)]
            return low + (high - low) * (half - below) / count
        below += count
    return None
