"""Times decode rounds from the begin of one to the begin of the next step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Round = TypeVar("Round")
MOST_WAITING = 8  # rounds whose seconds are not known yet: a scheduler is at most one round ahead of the results


class Clock(Protocol):
    """Marks moments of whatever runs the rounds."""

    def mark(self) -> Any:
        """This moment: after all that was launched before, and before all that is launched later."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """The seconds between two marks; None while they are not known. It does not wait."""
        ...


class HostClock:
    """Moments of the host: right where a round has ended when the call that runs it returns, as on a CPU."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        """read: gives seconds."""
        self._read = read

    def mark(self) -> float:
        """As `Clock.mark`."""
        return self._read()

    def seconds(self, begin: float, end: float) -> float:
        """As `Clock.seconds`."""
        return end - begin


class RoundTimes(Generic[Round]):
    """The seconds of rounds: from its begin to that of the next step, so that what the host takes between is in them.

    Each round has its own two marks, so that its time is right whatever came before it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.newest: Round | None = None  # the round that began last
        self._running: tuple[Round, bool, Any] | None = None  # whether its time will count, and when it began
        self._end: Any = None  # of the running round, if another step than a round has begun
        self._waiting: deque[tuple[Round, Any, Any]] = deque(maxlen=MOST_WAITING)

    def begin(self, begun: Round, counts: bool) -> list[tuple[Round, float]]:
        """Note that a round begins now; returns earlier ones with their seconds, which are known by now.

        counts: whether the time of this round will be one to learn from.
        """
        now = self._clock.mark()
        if self._running is not None:
            before, its_counts, began = self._running
            if its_counts:
                self._waiting.append((before, began, now if self._end is None else self._end))
        self._running, self._end, self.newest = (begun, counts, now), None, begun
        found = []
        while self._waiting:
            timed, *marks = self._waiting[0]
            seconds = self._clock.seconds(*marks)
            if seconds is None:
                break
            found.append((timed, seconds))
            self._waiting.popleft()
        return found

    def end(self) -> None:
        """The running round ends now: the step that begins is none."""
        if self._running is not None and self._end is None:
            self._end = self._clock.mark()

    def drop(self) -> None:
        """What the running round takes is not the time of a round."""
        self._running = self._end = None
