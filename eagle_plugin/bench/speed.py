"""The bf16 part of the demo: first answers side by side, then the speed of three servers in interleaved repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_plugin.bench.load import Sampling, engine_version
from eagle_plugin.bench.machine import busy_percent
from eagle_plugin.bench.measure import EarlyStop, Repeat, RepeatSeries, measure_interleaved
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import check_worker
from eagle_plugin.bench.side_by_side import show_side_by_side
from eagle_plugin.bench.spec import Mode, ServerSpec
from eagle_plugin.bench.startup import serving, warm_up_all
from eagle_plugin.bench.steal import StealWatch

BUSY_LIMIT = 10.0  # percent of all cores
SHOWN_QUESTIONS = 2
SHOWN_TOKENS = 96
MEASURE_SECONDS = 120.0  # EarlyStop.max_seconds, chosen so that the demo takes at most 6 minutes on two cores
RATIOS = (("plugin", "plain"), ("plugin", "builtin"))


class SpeedResult(NamedTuple):
    """What the bf16 part of the demo measured."""

    series: dict[Mode, RepeatSeries]
    engine_version: str
    plugin_line: str  # the line of the start-up log in which the plugin tells what it serves
    busy_percent: float  # use of all cores by other processes just before the measurement
    stop_reason: str
    over_steal_limit: float | None  # part of the measured spans with too much steal; None if steal is unknown


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
        warm_up_all(servers, repeats[0], steps)
        titles = {"plain decoding": servers["plain"], "eagle-plugin": plugin}
        show_side_by_side(titles, repeats[0][:SHOWN_QUESTIONS], min(SHOWN_TOKENS, max_tokens), steps)
        plugin.resume()
        version = engine_version(plugin.endpoint)
        plugin.pause()
        busy = busy_percent()
        if busy > BUSY_LIMIT:
            steps.log(f"[bold yellow]other processes use {busy:.0f} % of this machine: the results will be off[/]")
        enough = EarlyStop(RATIOS, max_seconds=MEASURE_SECONDS)
        done, total = 0, len(repeats) * len(servers)
        watch = StealWatch(total, lambda text: steps.log(f"[yellow]{text}[/]"))
        with steps.step("measuring") as step:

            def advance(mode: Mode, number: int, repeat: Repeat) -> None:
                nonlocal done
                done += 1
                detail = f"repeat {number + 1} of at most {len(repeats)}, {mode} {repeat.tokens_per_s:.1f} tokens/s"
                step.update(detail, done / total)

            sampling = Sampling(max_tokens=max_tokens)
            stop = (lambda series: False) if thorough else enough
            series = measure_interleaved(servers, repeats, sampling, advance, stop, watch)
    return SpeedResult(series, version, plugin_line, busy, enough.reason, watch.over_limit_share)
