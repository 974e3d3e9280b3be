"""The log line with the time of drafting, and what is read from it."""

import pytest

from eagle_plugin.policy.draft_times import DraftTimes, newest


def test_the_last_line_counts_whatever_the_engine_writes_before_it():
    first, last = DraftTimes(0.25, 10), DraftTimes(1.5, 60)
    log = f"[2026-01-01] {first.line()}\nother\n(Worker pid=7) INFO 01-01 {last.line()}\nmore\n"
    assert newest(log) == last
    between = newest(log).since(first)
    assert between == DraftTimes(1.25, 50) and between.mean_ms == pytest.approx(25.0)


def test_a_line_that_is_being_written_does_not_count():
    whole, cut = DraftTimes(0.25, 10).line(), DraftTimes(1.5, 60).line()[:-3]
    assert newest(f"{whole}\n{cut}") == DraftTimes(0.25, 10)


def test_without_rounds_there_is_no_mean():
    assert newest("nothing") == DraftTimes() and DraftTimes().mean_ms is None
