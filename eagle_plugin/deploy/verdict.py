"""Whether a new head accepts less than the one before it: the test that decides a rollback, on accept lengths alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

CONFIDENCE_Z = 2.326  # one-sided 1%: a good head is rolled back by chance at most once in a hundred swaps
FEWEST_ROUNDS = 100  # below it the normal approximation of a mean of small integers is not trusted


@dataclass(frozen=True)
class Comparison:
    """Accept length (tokens per round, the bonus token included) before and after a swap."""

    before: float
    after: float
    z: float  # (after - before) in standard errors; -inf or inf where neither side varies
    enough: bool  # both sides have `FEWEST_ROUNDS` rounds

    @property
    def is_worse(self) -> bool:
        """Whether the new head is worse beyond chance: Welch's z under -`CONFIDENCE_Z`."""
        return self.enough and self.z < -CONFIDENCE_Z


def compare(before: Mapping[int, int], after: Mapping[int, int]) -> Comparison:
    """Compare two counts of rounds by their accept length (one-sided Welch test of the means).

    Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", Biometrika 34 (1947). Rounds of one request are not independent, so the test is somewhat too ready to
    see a difference; the caller reads as many requests as it can.

    Raises:
        ValueError: if a side has no rounds, a count is negative, or an accept length is below 1.

    """
    (n, mean, variance), (m, other, spread) = _moments(before), _moments(after)
    error = math.sqrt(variance / n + spread / m)
    difference = other - mean
    z = difference / error if error else math.copysign(math.inf, difference) if difference else 0.0
    return Comparison(mean, other, z, min(n, m) >= FEWEST_ROUNDS)


def _moments(rounds: Mapping[int, int]) -> tuple[int, float, float]:
    """Number, mean and unbiased variance of the accept lengths."""
    if any(length < 1 or count < 0 for length, count in rounds.items()):
        raise ValueError("accept lengths are 1 or more, and their counts are not negative")
    n = sum(rounds.values())
    if not n:
        raise ValueError("no round was verified, so there is no accept length to compare: send requests first")
    mean = sum(length * count for length, count in rounds.items()) / n
    variance = sum(count * (length - mean) ** 2 for length, count in rounds.items()) / max(n - 1, 1)
    return n, mean, variance
