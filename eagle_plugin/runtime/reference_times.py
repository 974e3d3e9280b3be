"""Times of different work on a processor that changes its speed: what counts is the time against a reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ReferenceTimes(Generic[Key]):
    """Times of forwards by what they are, each as a multiple of what a reference took just before and after it."""

    def __init__(self, reference: Callable[[], float]) -> None:
        """reference: runs and times the same forward each time, in seconds."""
        self._reference = reference
        self._last = self._fastest = reference()
        self._multiples: dict[Key, list[float]] = {}

    @property
    def cells(self) -> Collection[Key]:
        """Those that have a time."""
        return self._multiples.keys()

    def add(self, cell: Key, seconds: float) -> None:
        """One run of a forward, which has just ended."""
        self.add_all({cell: seconds})

    def add_all(self, parts: Mapping[Key, float]) -> None:
        """One run of several forwards, which have just ended."""
        before, self._last = self._last, self._reference()
        self._fastest = min(self._fastest, self._last)
        for cell, seconds in parts.items():
            self._multiples.setdefault(cell, []).append(2 * seconds / (before + self._last))

    def times(self) -> dict[Key, float]:
        """Seconds of each forward while the reference is fastest: of several runs the median."""
        return {cell: self._fastest * statistics.median(found) for cell, found in self._multiples.items()}
