"""Whether a server that starts still makes progress: when it printed last, and when it last printed something new."""

from __future__ import annotations

import re
from pathlib import Path

REPEATING = 3  # a server may repeat lines this many times as long as it may print nothing
# Of a line that is printed again, what differs: dates and times, ports of clients, durations.
_CHANGES = re.compile(
    r"\d+(?:[-:]\d+)+(?:[.,]\d+)?|127\.0\.0\.1:\d+|\d+(?:\.\d+)?\s*(?:ms|s|sec|seconds|min|minutes)\b"
)


class StartLog:
    """The log of a server that starts.

    An engine prints how far it is. One that hangs may print as well, but always the same: that it waits for a process,
    or that `/health` was asked.
    """

    def __init__(self, path: Path, began: float) -> None:
        """began: as time.monotonic(), like all times here."""
        self._path, self._size = path, 0
        self._last = self._new = began
        self._known: set[str] = set()

    def read(self, now: float) -> None:
        """Take note of what was printed since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._size)
            text = file.read()
        if text:
            self._last, self._size = now, self._size + len(text)
            lines = {_CHANGES.sub("", line) for line in text.decode("utf-8", errors="replace").splitlines()}
            if not lines <= self._known:
                self._new = now
                self._known |= lines

    def lack(self, now: float, silence_s: float) -> str | None:
        """What it lacks, for a sentence, if it printed nothing for this long, or only known lines for `REPEATING`
        times as long."""
        if now - self._last > silence_s:
            return f"printed nothing for {silence_s:.0f} s"
        if now - self._new > REPEATING * silence_s:
            return f"printed nothing new for {REPEATING * silence_s:.0f} s"
        return None
