"""Limits what is kept in memory of what the head has not read yet, and says what it reads first beyond the limit."""

from __future__ import annotations

from collections.abc import Mapping

MOST_BYTES = 2**28  # of the target's states of all requests


def most_deferred(row_bytes: int) -> int:
    """How many rows of so many bytes are kept, at least one; row_bytes: one row, or one of each request."""
    return max(1, MOST_BYTES // row_bytes)


def largest_first(counts: Mapping[str, int], most: int) -> list[str]:
    """The requests to read when more than `most` rows are kept: so many of the largest that half of `most` is left.

    counts: rows of each request. A forward costs less per row the more rows it has, so few large ones are read, and
    more than there must be. Of equal ones the oldest, the first in `counts`, comes first.
    """
    kept = sum(counts.values())
    chosen: list[str] = []
    if kept > most:
        for name in sorted(counts, key=lambda name: -counts[name]):
            if kept <= most // 2:
                break
            chosen.append(name)
            kept -= counts[name]
    return chosen
