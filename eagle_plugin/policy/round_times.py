"""Times decode rounds from the begin of one to the begin of the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Round = TypeVar("Round")


class RoundTimes(Generic[Round]):
    """The seconds of rounds whose begins are noted by the host.

    Where the host prepares a round while the device runs the one before it, it waits at its next begin for the device
    to end an earlier round: what lies between two begins is then the time of the round `lag` before.
    """

    def __init__(self, clock: Callable[[], float], lag: int = 0) -> None:
        """clock: seconds. lag: rounds that the host is ahead."""
        self._clock = clock
        self._begun: deque[tuple[Round, bool]] = deque(maxlen=lag + 1)
        self._last = 0.0  # when the newest of them began

    @property
    def newest(self) -> Round | None:
        """The round that began last; None after a pause."""
        return self._begun[-1][0] if self._begun else None

    def begin(self, begun: Round, counts: bool) -> tuple[Round, float] | None:
        """Note that a round begins now; returns a round before it with its seconds, if its time is one to learn from.

        counts: whether the time of this round will be.
        """
        now, found = self._clock(), None
        if len(self._begun) == self._begun.maxlen:
            timed, its_counts = self._begun[0]
            found = (timed, now - self._last) if its_counts else None
        self._begun.append((begun, counts))
        self._last = now
        return found

    def pause(self) -> None:
        """What comes before the next round is not a round's time: a prefill, or nothing to do."""
        self._begun.clear()
