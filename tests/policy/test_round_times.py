"""The seconds between the begins of rounds, and whose they are."""

from __future__ import annotations

import pytest

from eagle_plugin.policy.round_times import RoundTimes

BEGINS = (0.0, 1.0, 3.0, 6.0, 10.0)


def times(lag: int, counts: str) -> list[tuple[str, float] | None]:
    clock = iter(BEGINS)
    found = RoundTimes[str](lambda: next(clock), lag)
    return [found.begin(name, name in counts) for name in "abcde"]


def test_a_round_ends_when_the_next_one_begins() -> None:
    assert times(0, "abcd") == [None, ("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]


def test_a_host_that_is_ahead_waits_for_the_round_before() -> None:
    assert times(1, "abcd") == [None, None, ("a", 2.0), ("b", 3.0), ("c", 4.0)]


@pytest.mark.parametrize("lag", [0, 1])
def test_some_rounds_do_not_count(lag: int) -> None:
    found = [entry for entry in times(lag, "bd") if entry is not None]
    assert [name for name, _ in found] == (["b", "d"] if lag == 0 else ["b"])


def test_a_pause() -> None:
    clock = iter(BEGINS)
    found = RoundTimes[str](lambda: next(clock), 1)
    assert found.begin("a", True) is None and found.begin("b", True) is None and found.newest == "b"
    found.pause()
    assert found.newest is None
    assert [found.begin(name, True) for name in "cde"] == [None, None, ("c", 4.0)]
