"""Two ranks in threads of one process, whose hosts gather."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ThreadRanks:
    """Two ranks; one that waits in vain for the other fails."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._values: list[Any] = [None, None]
        self._own = threading.local()

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        self._values[self._own.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any rank."""
        found = self.gather(flag)
        assert all(isinstance(one, bool) for one in found), f"{found} do not belong together"
        return any(found)

    def run(self, each: Callable[[int], Any]) -> list[Any]:
        """What each rank returns."""

        def started(rank: int) -> Any:
            self._own.rank = rank
            return each(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(started, range(2)))
