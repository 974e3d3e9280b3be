"""Draws the result of the demo: speeds and ratios with their quartiles."""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.bench.drawing import GREY, new_figure, save_figure, whiskers
from eagle_plugin.bench.quartiles import Quartiles
from eagle_plugin.bench.report import DemoReport

COLOURS = (GREY, "#5b7fa6", "#d9662b")


def draw_demo(report: DemoReport, path: Path) -> None:
    """Write a PNG with one bar per server: tokens per second, and the ratio to plain decoding. Raises PictureError."""
    spreads, settings = report.spread, report.settings
    names = (
        "plain decoding",
        f"engine's {settings.algorithm}\n({settings.builtin_shape})",
        f"eagle-plugin\n({settings.plugin_shape})",
    )
    rates = (spreads.plain_tokens_per_s, spreads.builtin_tokens_per_s, spreads.plugin_tokens_per_s)
    one = Quartiles(q1=1.0, median=1.0, q3=1.0)
    ratios = (one, spreads.builtin_speedup_vs_plain, spreads.speedup_vs_plain)

    figure = new_figure(9, 4.6, f"{report.target} in {report.engine} {report.engine_version}")
    for axes, title, values, label in zip(
        figure.subplots(1, 2),
        ("tokens per second", "speed relative to plain decoding"),
        (rates, ratios),
        ("{:.1f}", "{:.2f}x"),
        strict=True,
    ):
        medians = [value.median for value in values]
        axes.bar(names, medians, color=COLOURS, width=0.62)
        with_spread = [index for index, value in enumerate(values) if value.q3 > value.q1]
        axes.errorbar(
            with_spread,
            [medians[i] for i in with_spread],
            yerr=whiskers([values[i] for i in with_spread]),
            fmt="none",
            ecolor=axes.title.get_color(),
            capsize=5,
        )
        for index, value in enumerate(values):
            axes.annotate(
                label.format(value.median), (index, value.q3), (0, 4), textcoords="offset points", ha="center"
            )
        axes.set_title(title, fontsize=11)
        axes.set_ylim(0, 1.15 * max(value.q3 for value in values))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", length=0)
    caption = (
        f"bf16, one request at a time, greedy; medians and quartiles of {settings.repeats} interleaved repeats\n"
        f"{report.machine.cores} cores, {report.machine.cpu}, {settings.threads} threads; {report.date[:10]}"
    )
    save_figure(figure, path, caption)
