"""Writes and reads the log line that says how long the drafting of rounds took."""

from __future__ import annotations

import re
from typing import NamedTuple

VARIABLE = "EAGLE_DRAFT_TIMES"  # "1": a server on a CPU writes the line
MARK = "eagle-plugin: drafting took"
LINE = re.compile(rf"{MARK} (\d+\.\d{{6}}) s in (\d+) rounds$", re.MULTILINE)


class DraftTimes(NamedTuple):
    """Sums since the start of the server, or between two moments; rounds are those of a whole batch that drafted.

    The seconds are those of the head: of drafting, and of reading what was accepted.
    """

    seconds: float = 0.0
    rounds: int = 0

    def plus(self, seconds: float, rounds: int = 1) -> DraftTimes:
        """With so much more; a round has several parts, of which one counts it."""
        return DraftTimes(self.seconds + seconds, self.rounds + rounds)

    def since(self, before: DraftTimes) -> DraftTimes:
        """What came after `before`."""
        return DraftTimes(self.seconds - before.seconds, self.rounds - before.rounds)

    @property
    def mean_ms(self) -> float | None:
        """Milliseconds per round; None without rounds."""
        return 1e3 * self.seconds / self.rounds if self.rounds else None

    def line(self) -> str:
        """The log line."""
        return f"{MARK} {self.seconds:.6f} s in {self.rounds} rounds"


def newest(log: str) -> DraftTimes:
    """The sums in the last line of a server's log; zero if there is none."""
    found = LINE.findall(log)
    return DraftTimes(float(found[-1][0]), int(found[-1][1])) if found else DraftTimes()
