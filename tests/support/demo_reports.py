"""A report of the demo with known numbers, and the bars of its picture."""

from pathlib import Path

from PIL import Image, ImageColor

from eagle_plugin.bench.load import Completion
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.measure import Repeat, RepeatSeries
from eagle_plugin.bench.quartiles import quartiles, ratio_quartiles
from eagle_plugin.bench.report import (
    DemoReport,
    DemoSettings,
    Equality,
    SpreadDetail,
    plain_stats,
    speculative_stats,
)
from eagle_plugin.bench.stream_fields import Output


def series(seconds: float, rounds: int | None) -> RepeatSeries:
    repeats = [
        Repeat((Completion("q", Output("text"), "stop", 5, 65, 0.1, seconds * slow, (), rounds),)) for slow in (1, 2, 1)
    ]
    return RepeatSeries(tuple(repeats))


def demo_report() -> DemoReport:
    plain, builtin, plugin = series(2.0, None), series(1.9, 40), series(1.25, 32)
    rates = [one.tokens_per_s for one in (plain, builtin, plugin)]
    return DemoReport(
        engine="sglang", engine_version="0.5.23", target="smol", head="smol-eagle3", prompts=3, greedy_equal=True,
        plain=plain_stats(plain),
        builtin=speculative_stats(builtin, "builtin"),
        plugin=speculative_stats(plugin, "plugin"),
        speedup_vs_plain=1.6, speedup_vs_builtin=1.52,
        equality=Equality(
            max_tokens=64, equal=3, compared=3, different=[], bf16_builtin_equal=1, bf16_plugin_equal=2, bf16_compared=3
        ),
        spread=SpreadDetail(
            plain_tokens_per_s=quartiles(rates[0]),
            builtin_tokens_per_s=quartiles(rates[1]),
            plugin_tokens_per_s=quartiles(rates[2]),
            builtin_speedup_vs_plain=ratio_quartiles(rates[1], rates[0]),
            speedup_vs_plain=ratio_quartiles(rates[2], rates[0]),
            speedup_vs_builtin=ratio_quartiles(rates[2], rates[1]),
        ),
        settings=DemoSettings(
            max_tokens=65, repeats=3, max_repeats=8, stop_reason="narrow", prompts_measured=3,
            threads=2, algorithm="EAGLE3", plugin_shape="2/4/8",
            builtin_shape="2/1/3", plugin_worker="eagle-plugin", quick=False, thorough=False, busy_percent=1.5,
        ),
        versions={"sglang": "0.5.23"}, machine=describe_machine(), date="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def bar_heights(path: Path, colour: str) -> list[int]:
    """Height in pixels of each bar of that colour, from left to right."""
    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
    wanted, heights, inside = ImageColor.getrgb(colour), [], False
    for x in range(pixels.width):
        column = [pixels.getpixel((x, y)) == wanted for y in range(pixels.height)]
        height = pixels.height - column[::-1].index(True) - column.index(True) if any(column) else 0
        if height and not inside:
            heights.append(0)
        inside = height > 0
        if inside:
            heights[-1] = max(heights[-1], height)
    return heights
