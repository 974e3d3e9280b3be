"""Watches steal: processor time that this virtual machine wanted and that its host gave to others.

A span with much steal measures the other guests of the host, so it is measured again. Where /proc/stat is missing
(another system than Linux) nothing is watched and nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

STEAL_LIMIT = 0.05  # of the processor time that the machine wanted
MAX_TRIES = 3  # measurements of one span, the first included
EXTRA_SHARE = 0.25  # of the planned spans may be measured again

T = TypeVar("T")


class Ticks(NamedTuple):
    """Clock ticks of all cores since the machine started."""

    used: int  # by processes and the kernel
    stolen: int  # wanted, and given to others


def parse_ticks(text: str) -> Ticks | None:
    """Ticks of the content of /proc/stat; None if it has no steal column. Columns: `man 5 proc_stat`."""
    for line in text.splitlines():
        name, *columns = line.split()
        if name == "cpu" and len(columns) >= 8:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
            return Ticks(user + nice + system + irq + softirq, steal)  # user has the time of guests already
    return None


def read_ticks(path: Path = Path("/proc/stat")) -> Ticks | None:
    """The ticks until now; None where there is no such file."""
    try:
        return parse_ticks(path.read_text(encoding="utf-8"))
    except OSError:
        return None


def steal_share(before: Ticks | None, after: Ticks | None) -> float | None:
    """Stolen part of the processor time that was wanted between two readings; None if it is unknown."""
    if before is None or after is None:
        return None
    stolen = after.stolen - before.stolen
    wanted = stolen + after.used - before.used
    return stolen / wanted if wanted > 0 else 0.0


@dataclass(frozen=True)
class Watched(Generic[T]):
    """What a span returned, and the steal while it ran."""

    value: T
    steal: float | None


class StealWatch:
    """Repeats measured spans that had more than `limit` steal, within bounds, and counts them.

    Args:
        planned: spans that will be measured; a quarter of them, and at least one, may be measured again.
        log: gets one sentence per repeated span.
        read: gives the ticks until now.
    """

    def __init__(
        self,
        planned: int,
        log: Callable[[str], None] = lambda text: None,
        limit: float = STEAL_LIMIT,
        read: Callable[[], Ticks | None] = read_ticks,
    ) -> None:
        self.limit, self._log, self._read = limit, log, read
        self._extra = max(1, int(planned * EXTRA_SHARE))
        self.spans = self.over_limit = self.repeated = 0

    @property
    def over_limit_share(self) -> float | None:
        """The part of all measured spans, repeated ones included, that had too much steal; None if unknown."""
        return self.over_limit / self.spans if self.spans else None

    def least_stolen(self, measure: Callable[[], T], name: str = "a span") -> Watched[T]:
        """Measure; again while there was too much steal and a repeat is left. Returns the try with the least steal."""
        best: Watched[T] | None = None
        for number in range(1, MAX_TRIES + 1):
            before = self._read()
            value = measure()
            steal = steal_share(before, self._read())
            if steal is None:
                return Watched(value, None)
            self.spans += 1
            self.over_limit += steal > self.limit
            if best is None or best.steal is None or steal < best.steal:
                best = Watched(value, steal)
            if steal <= self.limit or number == MAX_TRIES or self._extra == 0:
                break
            self._extra -= 1
            self.repeated += 1
            self._log(f"{name}: {steal:.0%} of the processor time went to other guests of the host; measured again")
        assert best is not None
        return best
