"""Times the drafting of served rounds on a CPU, for benchmarks (``EAGLE_DRAFT_TIMES=1``)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.draft_times import VARIABLE, DraftTimes

SECONDS = 0.25  # between two log lines
T = TypeVar("T")


class DraftClock:
    """Calls what the head does in a round, and writes the sum of its times into the log; by default it only calls.

    The times are those of the host. A GPU works on after a call has returned, so nothing is timed there.
    """

    def __init__(
        self, device_type: str, logger: logging.Logger, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        asked = os.environ.get(VARIABLE, "") == "1"
        if asked and device_type != "cpu":
            logger.warning("eagle-plugin: %s=1 times drafts on a CPU only, found a %s: none", VARIABLE, device_type)
        self._on = asked and device_type == "cpu"
        self._logger, self._clock = logger, clock
        self._times, self._written = DraftTimes(), 0.0

    def time(self, shape: Shape, draft: Callable[[], T]) -> T:
        """What `draft` returns; a plain round drafts nothing and is not counted."""
        return self._timed(shape, draft, 1)

    def time_reading(self, shape: Shape, read: Callable[[], T]) -> T:
        """What `read` returns: the head reads the accepted tokens of a round of this shape, or for one."""
        return self._timed(shape, read, 0)

    def _timed(self, shape: Shape, call: Callable[[], T], rounds: int) -> T:
        if not self._on or shape == PLAIN:
            return call()
        began = self._clock()
        result = call()
        now = self._clock()
        self._times = self._times.plus(now - began, rounds)
        if now - self._written >= SECONDS:
            self._written = now
            self._logger.info("%s", self._times.line())
        return result
