"""Reads counts of rounds by their accepted drafts, of a running server or of captured answers, and their mean."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import httpx

from eagle_plugin.bench.policy_sources import counted_rounds
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.http_failures import describe_failure

ROUNDS_PER_ANSWER = 16.0  # rounds of one answer resemble each other: so many count as one independent round
Z_LIMIT = 2.326  # one-sided, level 1 %
DRAFTING = "the server drafts nothing yet, or has no metrics: send requests, and start SGLang with --enable-metrics"


class CountsError(UserError):
    """A server has no counts of rounds."""


class Counts(NamedTuple):
    """Rounds of a server since its start, and those that accepted 1, 2, ... drafts or more."""

    rounds: float
    at_depth: tuple[float, ...]

    @classmethod
    def of_rounds(cls, rounds: Counter[int]) -> Counts:
        """From rounds that accepted exactly so many drafts."""
        deepest = max(rounds)
        reached = (sum(rounds[k] for k in range(depth, deepest + 1)) for depth in range(1, deepest + 1))
        return cls(rounds.total(), tuple(map(float, reached)))

    def since(self, before: Counts) -> Counts:
        """What came after `before`; everything if the server was started again meanwhile."""
        if self.rounds < before.rounds:
            return self
        old = dict(enumerate(before.at_depth))
        return Counts(self.rounds - before.rounds, tuple(n - old.get(k, 0.0) for k, n in enumerate(self.at_depth)))

    @property
    def accept_length(self) -> float:
        """Tokens per round, the bonus token included; ZeroDivisionError without rounds."""
        return 1 + sum(self.at_depth) / self.rounds

    @property
    def variance(self) -> float:
        """Of `accept_length`, where `ROUNDS_PER_ANSWER` rounds are one independent round."""
        # E[a^2] of a count a is the sum over d of (2 d - 1) P(a >= d).
        square = sum((2 * depth - 1) * count for depth, count in enumerate(self.at_depth, 1)) / self.rounds
        return max(square - (self.accept_length - 1) ** 2, 1e-12) * ROUNDS_PER_ANSWER / self.rounds


def counts_of(text: str, plain: bool = False) -> Counts:
    """The counts in a text of Prometheus metrics, of all engines in it together; plain: of rounds without drafts too.

    Raises:
        CountsError: it is no such text, or the plugin has drafted nothing.
    """
    try:
        return Counts(*counted_rounds(text, plain))
    except ValueError as error:
        raise CountsError(f"the answer is no text of Prometheus metrics ({error}); give the URL of a server") from error
    except KeyError as error:
        raise CountsError(f"the metrics have no {error.args[0]}; {DRAFTING}") from error


def served_counts(url: str, plain: bool = False) -> Counts:
    """The counts of a running server; url: of its HTTP endpoint, with or without /v1; plain: see `counts_of`.

    Raises:
        CountsError: it does not answer, or has no counts.
    """
    address = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    try:
        answer = httpx.get(address, timeout=15.0, trust_env=False, follow_redirects=True).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CountsError(
            f"{address} does not answer with metrics ({describe_failure(error)}); check address and port, and start "
            "SGLang with --enable-metrics"
        ) from error
    return counts_of(answer.text, plain)
