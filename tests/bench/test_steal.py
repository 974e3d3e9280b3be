"""Steal of a span, and the decision to measure a span again."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from eagle_plugin.bench.steal import StealWatch, Ticks, Watched, parse_ticks, read_ticks, steal_share

PROC_STAT = """\
cpu  4477251 1435187 646689 963361 29270 3 7144 22093 11 0
cpu0 2152812 707269 312261 593964 10170 0 1318 11206 0 0
intr 12345
"""


def test_the_first_line_is_read():
    assert parse_ticks(PROC_STAT) == Ticks(4477251 + 1435187 + 646689 + 3 + 7144, 22093)


@pytest.mark.parametrize("text", ["", "cpu0 1 2 3 4 5 6 7 8\n", "cpu 1 2 3 4\n", "intr 5\n"])
def test_a_file_without_the_column_tells_nothing(text):
    assert parse_ticks(text) is None


def test_a_missing_file_tells_nothing(tmp_path: Path):
    assert read_ticks(tmp_path / "stat") is None
    (tmp_path / "stat").write_text(PROC_STAT)
    assert read_ticks(tmp_path / "stat") == parse_ticks(PROC_STAT)


def test_the_share_is_of_what_was_wanted():
    """An idle core does not make the share smaller."""
    assert steal_share(Ticks(100, 10), Ticks(160, 50)) == 0.4
    assert steal_share(Ticks(100, 10), Ticks(100, 10)) == 0.0
    assert steal_share(None, Ticks(1, 1)) is None and steal_share(Ticks(1, 1), None) is None


class Spans:
    """A machine on which each span has the given steal in percent; the value of a span is its number."""

    def __init__(self, *percents: float | None) -> None:
        self.measured = 0
        self._readings = self._read(percents)

    def _read(self, percents: Iterable[float | None]) -> Iterable[Ticks | None]:
        used = stolen = 0.0
        for percent in percents:
            yield None if percent is None else Ticks(int(used), int(stolen))
            used, stolen = used + 1000 - 10 * (percent or 0), stolen + 10 * (percent or 0)
            yield None if percent is None else Ticks(int(used), int(stolen))

    def read(self) -> Ticks | None:
        return next(self._readings)

    def measure(self) -> int:
        self.measured += 1
        return self.measured


def test_a_quiet_span_is_measured_once():
    spans = Spans(0, 5)
    watch = StealWatch(8, read=spans.read)
    assert watch.least_stolen(spans.measure) == Watched(1, 0.0)
    assert watch.least_stolen(spans.measure) == Watched(2, 0.05)  # at the limit, not over it
    assert (watch.spans, watch.over_limit, watch.repeated, watch.over_limit_share) == (2, 0, 0, 0.0)


def test_a_span_with_steal_is_measured_again_until_it_has_little():
    logged: list[str] = []
    spans = Spans(40, 3)
    watch = StealWatch(8, logged.append, read=spans.read)
    assert watch.least_stolen(spans.measure, "4 clients, plain") == Watched(2, 0.03)
    assert logged == ["4 clients, plain: 40% of the processor time went to other guests of the host; measured again"]
    assert (watch.spans, watch.over_limit, watch.repeated, watch.over_limit_share) == (2, 1, 1, 0.5)


def test_after_three_tries_the_one_with_the_least_steal_counts():
    spans = Spans(40, 20, 30)
    watch = StealWatch(100, read=spans.read)
    assert watch.least_stolen(spans.measure) == Watched(2, 0.2)
    assert (watch.spans, watch.over_limit, watch.repeated) == (3, 3, 2)


def test_a_quarter_of_the_planned_spans_may_be_measured_again():
    spans = Spans(*[40] * 10)
    watch = StealWatch(8, read=spans.read)
    tries = []
    for _ in range(8):
        before = spans.measured
        watch.least_stolen(spans.measure)
        tries.append(spans.measured - before)
    assert tries == [3, 1, 1, 1, 1, 1, 1, 1] and watch.repeated == 2


def test_without_the_file_nothing_is_repeated():
    spans = Spans(None, None)
    watch = StealWatch(8, read=spans.read)
    assert watch.least_stolen(spans.measure) == Watched(1, None)
    assert (watch.spans, watch.over_limit_share) == (0, None)
