"""Whether a new head accepts less than the one before it: the test that decides a rollback, on accept lengths alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_plugin.learning.deploy.counts import Z_LIMIT, Counts

FEWEST_ROUNDS = 400  # of 25 answers; below it the normal approximation of the mean is not trusted


@dataclass(frozen=True)
class Comparison:
    """Accept length (tokens per round, the bonus token included) before and after an exchange."""

    before: float
    after: float
    z: float  # (after - before) in standard errors
    enough: bool  # both sides have `FEWEST_ROUNDS` rounds

    @property
    def is_worse(self) -> bool:
        """Whether the new head is worse beyond chance: z is under -`Z_LIMIT`."""
        return self.enough and self.z < -Z_LIMIT


def compare(before: Counts, after: Counts) -> Comparison:
    """Compare two counts of rounds, none of them empty (one-sided Welch test of the means).

    Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", Biometrika 34 (1947).
    """
    z = (after.accept_length - before.accept_length) / math.sqrt(before.variance + after.variance)
    return Comparison(before.accept_length, after.accept_length, z, min(before.rounds, after.rounds) >= FEWEST_ROUNDS)
