"""Drafts are timed where it is asked for, on a CPU only."""

from __future__ import annotations

import logging

import pytest

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.draft_times import VARIABLE, DraftTimes, newest
from eagle_plugin.runtime.draft_clock import DraftClock

SHAPE = Shape.chain(3)
logger = logging.getLogger("eagle_plugin.test_draft_clock")


class Clock:
    """Goes on by what a draft takes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def draft(self) -> str:
        self.now += 0.125
        return "drafts"


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "".join(f"{record.getMessage()}\n" for record in caplog.records)


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, logger.name)


def test_rounds_that_draft_are_timed(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "1")
    clock = Clock()
    times = DraftClock("cpu", logger, clock)
    for shape in (SHAPE, SHAPE, PLAIN):
        assert times.time(shape, clock.draft) == "drafts"
    assert newest(logged(caplog)) == DraftTimes(0.125, 1)  # the line is written at most four times per second
    times.time(SHAPE, clock.draft)
    assert newest(logged(caplog)) == DraftTimes(0.375, 3) and len(caplog.records) == 2
    for shape in (SHAPE, PLAIN):
        assert times.time_reading(shape, clock.draft) == "drafts"
    clock.now += 1
    times.time(SHAPE, clock.draft)
    assert newest(logged(caplog)) == DraftTimes(0.625, 4)


@pytest.mark.parametrize(("asked", "device"), [("", "cpu"), ("0", "cpu"), ("1", "cuda")])
def test_nothing_is_timed_otherwise(asked, device, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, asked)
    clock = Clock()
    times = DraftClock(device, logger, clock)
    assert times.time(SHAPE, clock.draft) == "drafts"
    assert newest(logged(caplog)) == DraftTimes()
    assert ("on a CPU only, found a cuda" in logged(caplog)) == (asked == "1")
