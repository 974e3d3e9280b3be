"""The seconds between the begins of steps, and whose they are."""

from __future__ import annotations

import pytest

from eagle_plugin.policy.round_times import MOST_WAITING, HostClock, RoundTimes


class Device:
    """A clock of events: what it tells is known once the device has passed a mark; it has passed `done` of them."""

    def __init__(self) -> None:
        self.marks, self.done = 0, 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, begin: int, end: int) -> float | None:
        return float(end - begin) if end <= self.done else None


def of_host(*times: float) -> RoundTimes[str]:
    clock = iter(times)
    return RoundTimes[str](HostClock(lambda: next(clock)))


def test_a_round_ends_when_the_next_one_begins() -> None:
    times = of_host(0.0, 1.0, 3.0, 6.0)
    assert [times.begin(name, True) for name in "abcd"] == [[], [("a", 1.0)], [("b", 2.0)], [("c", 3.0)]]


def test_some_rounds_do_not_count() -> None:
    times = of_host(0.0, 1.0, 3.0, 6.0, 10.0)
    assert [times.begin(name, name in "bd") for name in "abcde"] == [[], [], [("b", 2.0)], [], [("d", 4.0)]]


def test_a_round_ends_where_another_step_begins() -> None:
    """And the one after that step has its own time."""
    times = of_host(0.0, 1.0, 1.5, 9.0, 11.0)
    times.begin("a", True)
    times.begin("b", True)
    times.end()
    times.end()  # the step has several parts
    assert times.begin("c", True) == [("b", 0.5)]
    assert times.begin("d", True) == [("c", 2.0)]


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_dropped_has_no_time(has_ended: bool) -> None:
    times = of_host(0.0, 1.0, 5.0, 6.0)
    times.begin("a", True)
    if has_ended:
        times.end()
    times.drop()
    assert times.newest == "a"
    assert times.begin("b", True) == []
    assert times.begin("c", True) == [("b", 1.0 if has_ended else 4.0)]


def test_a_device_tells_later_and_nobody_waits() -> None:
    device = Device()
    times = RoundTimes[str](device)
    assert [times.begin(name, True) for name in "abc"] == [[], [], []]
    device.done = 2
    assert times.begin("d", True) == [("a", 1.0)]
    device.done = 4
    assert times.begin("e", True) == [("b", 1.0), ("c", 1.0)]


def test_of_a_device_that_tells_nothing_not_all_rounds_are_kept() -> None:
    device = Device()
    times = RoundTimes[int](device)
    for number in range(100):
        assert times.begin(number, True) == []
    device.done = 1000
    assert [number for number, _ in times.begin(100, True)] == list(range(100 - MOST_WAITING, 100))
