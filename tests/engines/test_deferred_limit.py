"""How much that the head has not read is kept, and who is read first."""

from __future__ import annotations

import pytest

from eagle_plugin.runtime import deferred_limit
from eagle_plugin.runtime.deferred_limit import largest_first, most_deferred


def test_rows_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_deferred(4096) == 65536
    monkeypatch.setattr(deferred_limit, "MOST_BYTES", 100)
    assert [most_deferred(size) for size in (10, 33, 100, 101)] == [10, 3, 1, 1]


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ({}, ""),
        ({"a": 4, "b": 6}, ""),  # as many as there may be
        ({"a": 4, "b": 7}, "b"),
        ({"a": 4, "b": 4, "c": 4}, "ab"),  # of equal ones the oldest, until half is left
        ({"a": 1, "b": 90}, "b"),
        ({"a": 3, "b": 3, "c": 5}, "ca"),
    ],
)
def test_the_largest_are_read_until_half_is_left(counts: dict[str, int], chosen: str) -> None:
    assert largest_first(counts, most=10) == list(chosen)
