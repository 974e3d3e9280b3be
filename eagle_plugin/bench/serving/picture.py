"""Draws the result of the serving benchmark: the ratio to plain decoding over the number of clients."""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.bench.drawing import (
    GREY,
    PictureError,
    draw_points,
    finish_axes,
    new_figure,
    over_clients,
    save_figure,
)
from eagle_plugin.bench.serving.configs import Config
from eagle_plugin.bench.serving.report import Row, ServingReport
from eagle_plugin.bench.serving.table import NAMES

COLOURS: dict[Config, str] = {
    "builtin_chain": "#5b7fa6",
    "builtin_tree": "#2f4b6e",
    "fixed": "#e8a87c",
    "plugin": "#d9662b",
}
SHIFT = 1.03  # points of several servers at one number of clients are beside each other, on a logarithmic axis


def draw_serving(report: ServingReport, path: Path) -> None:
    """Write a PNG with one graph per temperature and kind of prompts. Raises PictureError.

    A point is the median of the ratio to plain decoding at one number of clients, its bar reaches from the first to
    the third quartile.
    """
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in report.rows:
        if row.spread.ratio_vs_plain:
            groups.setdefault((row.temperature, row.prompts), []).append(row)
    if not groups:
        raise PictureError("no picture: it shows ratios to plain decoding; measure plain and at least one other")
    title = f"{report.target} in {report.engine} {report.engine_version}"
    figure = new_figure(max(6.0, 4.4 * len(groups)), 4.6, title)
    columns = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, ((temperature, prompts), rows) in zip(columns, groups.items(), strict=True):
        rows = sorted(rows, key=lambda row: row.concurrency)
        axes.axhline(1.0, color=GREY, linewidth=1.2, label="plain decoding")
        for place, (config, colour) in enumerate(COLOURS.items()):
            ratios = ((row.concurrency, row.spread.ratio_vs_plain.get(config)) for row in rows)
            points = [(clients * SHIFT ** (place - 1.5), ratio) for clients, ratio in ratios]
            draw_points(axes, points, NAMES[config], color=colour)
        title = f"temperature {temperature:g}, {prompts} prompts"
        over_clients(axes, [row.concurrency for row in rows], title)
        finish_axes(axes)
    first = figure.axes[0]
    first.set_ylabel("tokens per second relative to plain decoding")
    first.legend(fontsize=8, frameon=False)
    caption = (
        f"closed loop, bf16; medians and quartiles of interleaved repeats; {report.machine.cores} cores, "
        f"{report.machine.cpu}, {report.settings.threads} threads; {report.date[:10]}"
    )
    save_figure(figure, path, caption)
