"""Measures the speed of the demo's three servers in bf16, after it has shown first answers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.bench.load import Sampling
from eagle_plugin.bench.measure import EarlyStop, RepeatSeries, measure_interleaved
from eagle_plugin.bench.preparation import check_busy, version_of
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.report import ShownQuestion
from eagle_plugin.bench.servers import check_worker
from eagle_plugin.bench.side_by_side import show_side_by_side
from eagle_plugin.bench.spec import Mode, ServerSpec
from eagle_plugin.bench.startup import serving, warm_up_all
from eagle_plugin.bench.turns import watch_steal

SHOWN_QUESTIONS = 2
SHOWN_TOKENS = 64
# Of `EarlyStop`, chosen so that the table comes within five minutes of a clean clone on two cores.
LEAST_REPEATS = 4
DECIDED_SECONDS, MOST_SECONDS = 90.0, 150.0
RATIOS = (("plugin", "plain"), ("plugin", "builtin"))


class SpeedResult(NamedTuple):
    """What the bf16 part of the demo measured."""

    series: dict[Mode, RepeatSeries]
    engine_version: str
    plugin_line: str  # the line of the start-up log in which the plugin tells what it serves
    busy_percent: float  # use of all cores by other processes just before the measurement
    stop_reason: str
    over_steal_limit: float | None  # part of the measured spans with too much steal; None if steal is unknown
    shown: list[ShownQuestion]  # the answers that were shown side by side


def measure_speed(
    specs: Mapping[Mode, ServerSpec],
    repeats: Sequence[Sequence[Question]],
    max_tokens: int,
    thorough: bool,
    logs: Path,
    steps: Steps,
) -> SpeedResult:
    """Start the three servers, show a few answers, and measure; `thorough` makes every repeat."""
    with serving(specs, logs, steps) as servers:
        plugin = servers["plugin"]
        plugin_line = check_worker(plugin, "plugin")
        warm_up_all(servers, repeats[0][:1], steps)
        titles = {"plain decoding": servers["plain"], "eagle-plugin": plugin}
        shown = show_side_by_side(titles, repeats[0][:SHOWN_QUESTIONS], min(SHOWN_TOKENS, max_tokens), steps)
        version, busy = version_of(plugin), check_busy(steps)
        enough = EarlyStop(RATIOS, LEAST_REPEATS, decided_seconds=DECIDED_SECONDS, most_seconds=MOST_SECONDS)
        planned = len(repeats) if thorough else min(len(repeats), LEAST_REPEATS)
        watch = watch_steal(planned * len(servers), steps)
        with steps.step("measuring") as step:
            sampling = Sampling(max_tokens=max_tokens)
            stop = (lambda series: False) if thorough else enough
            series = measure_interleaved(servers, repeats, sampling, step.update, stop, watch)
    return SpeedResult(series, version, plugin_line, busy, enough.reason, watch.over_limit_share, shown)
