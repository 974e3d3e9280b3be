"""Counts what the rounds of a server yield as Prometheus metrics (docs/metrics.md), and warns where the target rejects
every draft."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from eagle_plugin.common.metric_registry import forget
from eagle_plugin.policy import metric_table
from eagle_plugin.policy.metrics import exported

# With a head that is right for one draft in ten, so many rounds in a row are rejected once in 10^9 rounds.
REJECTED_ROUNDS = 200


class RoundMetrics:
    """What the verify rounds of this process yield; a new object takes the place of an older one.

    A round is one request's tree in one forward of the target.
    """

    def __init__(self, label_names: Sequence[str], depth: int) -> None:
        """Register the metrics with the labels of the engine's own; depth is that of the deepest path of drafts."""
        forget()
        self._depth = depth
        self._rounds = exported(metric_table.VERIFY_ROUNDS, label_names)
        self._drafted = exported(metric_table.DRAFTED_TOKENS, label_names)
        self._accepted = exported(metric_table.ACCEPTED_TOKENS, label_names)
        self._at_depth = exported(metric_table.ACCEPTED_AT_DEPTH, label_names)
        self._lengths = exported(metric_table.ACCEPT_LENGTH, label_names, buckets=range(1, depth + 2))
        self._rejected = exported(metric_table.REJECTED_ROUNDS, label_names)
        self._eager = exported(metric_table.EAGER_STEPS, label_names)

    def labelled(self, *values: str) -> Recorder:
        """The metrics under these values of the labels."""
        return Recorder(
            self._rounds.labels(*values),
            self._drafted.labels(*values),
            self._accepted.labels(*values),
            self._lengths.labels(*values),
            [self._at_depth.labels(*values, str(depth)) for depth in range(1, self._depth + 1)],
            self._rejected.labels(*values),
            lambda reason: self._eager.labels(*values, reason),
        )


class Recorder:
    """One engine's metrics."""

    def __init__(
        self,
        rounds: Any,
        drafted: Any,
        accepted: Any,
        lengths: Any,
        at_depth: list[Any],
        rejected: Any,
        eager: Callable[[str], Any],
    ) -> None:
        self._rounds, self._drafted, self._accepted = rounds, drafted, accepted
        self._lengths, self._at_depth, self._rejected = lengths, at_depth, rejected
        self._eager = eager
        self._in_a_row = 0

    def record_eager(self, reasons: Sequence[str]) -> None:
        """Count one step of the engine that ran in part without graphs, under each of its reasons."""
        for reason in reasons:
            self._eager(reason).inc()

    def record(self, kept: Sequence[int], drafted: int) -> None:
        """Count rounds; kept has the accepted draft tokens of each, drafted is the number of draft tokens of all.

        The thread that schedules the engine calls it in every step, and a call of the client takes about a microsecond
        where processes share their counts: there are as many calls for hundreds of requests as for one of each length.
        """
        rounds = Counter(kept)
        self._rounds.inc(len(kept))
        self._drafted.inc(drafted)
        self._accepted.inc(sum(kept))
        for tokens, times in rounds.items():
            observe(self._lengths, tokens + 1, times)
        for depth, counter in enumerate(self._at_depth, start=1):
            if reached := sum(times for tokens, times in rounds.items() if tokens >= depth):
                counter.inc(reached)
        in_a_row = rejected_in_a_row(self._in_a_row, kept)
        if in_a_row != self._in_a_row:
            self._in_a_row = in_a_row
            self._rejected.set(in_a_row)


def observe(histogram: Any, amount: float, times: int) -> None:
    """Observe an amount so many times; the client takes one at a time, its values take sums."""
    buckets, bounds = getattr(histogram, "_buckets", None), getattr(histogram, "_upper_bounds", None)
    total = getattr(histogram, "_sum", None)
    if not buckets or not bounds or total is None:  # another version of the client
        for _ in range(times):
            histogram.observe(amount)
        return
    total.inc(times * amount)
    buckets[bisect_left(bounds, amount)].inc(times)


def rejected_in_a_row(before: int, kept: Sequence[int]) -> int:
    """Rounds in a row that kept no drafted token, after `before` of them and one step of the engine.

    kept has the accepted draft tokens of each round of the step. Its rounds have no order: where some kept a token, the
    count starts again after them.
    """
    return 0 if any(kept) else before + len(kept)


class RejectionWatch:
    """Warns once per server that every draft is rejected: it runs, but slower than without drafts.

    A head may be damaged, or of another target, and have passed every check of names and shapes: a server decodes
    rightly with any drafts.
    """

    def __init__(self, target: str, head: str | None, logger: logging.Logger) -> None:
        """target and head as the user named them; head None: an MTP layer of the target drafts."""
        self._target, self._head, self._logger = target, head, logger
        self._in_a_row = 0
        self._warned = False

    def record(self, kept: Sequence[int]) -> None:
        """Count the rounds of one step; kept has the accepted draft tokens of each, on the host."""
        if self._warned:
            return
        self._in_a_row = rejected_in_a_row(self._in_a_row, kept)
        if self._in_a_row >= REJECTED_ROUNDS:
            self._warned = True
            if self._head is None:
                self._logger.warning(
                    "eagle-plugin: the target rejected every draft of %d rounds in a row, so that drafting only costs "
                    "time: the weights of the MTP layer in %s are damaged, missing or of another training of "
                    "the target; compare them with those of its publisher, or start without --speculative-algorithm",
                    self._in_a_row,
                    self._target,
                )
                return
            self._logger.warning(
                "eagle-plugin: the target rejected every draft of %d rounds in a row, so that drafting only costs "
                "time: the head %s is damaged or was trained for another target than %s; likely causes in their order: "
                "another target or chat template than in training, other aux layers or another rope_theta in its "
                "config.json, an embedding or a d2t that is not its own, weights that were never trained or not copied "
                "whole; run: eagle-plugin check %s %s",
                self._in_a_row,
                self._head,
                self._target,
                self._target,
                self._head,
            )
