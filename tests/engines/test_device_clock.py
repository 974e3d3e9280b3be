"""The clock of a device: events on a GPU, which nobody waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.runtime.device_clock import EventClock, clock_of


class Event:
    """An event of a stream whose time is `now`, and which has passed the first `done` events."""

    now, done, made = 0.0, 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.number, self.time = Event.made, None

    def record(self) -> None:
        self.time = Event.now

    def query(self) -> bool:
        return self.time is not None and self.number <= Event.done

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query() and self.time is not None and end.time is not None
        return 1e3 * (end.time - self.time)


def test_marks_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    clock = clock_of("cuda")
    assert isinstance(clock, EventClock)
    begin = clock.mark()
    Event.now = 0.25
    end = clock.mark()
    for Event.done in range(2):
        assert clock.seconds(begin, end) is None
    Event.done = 2
    assert clock.seconds(begin, end) == 0.25


def test_a_cpu_has_the_clock_of_its_host() -> None:
    assert isinstance(clock_of("cpu"), HostClock)
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
