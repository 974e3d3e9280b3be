"""What a policy expects, as a picture: the cost of a step and the gain over plain decoding, over the width of trees."""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.bench.drawing import new_figure
from eagle_plugin.common.atomic_io import replace_output
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.report import PolicyReport, present_choice

COLOURS = ("#5b7fa6", "#d9662b", "#4a8f5d", "#8a5fa8", "#b39b2f", "#3fa3a3", "#a8485f", "#6b6b6b")
PRESENT = "#111111"


def lines_by_depth(report: PolicyReport) -> dict[int, list[Shape]]:
    """The shapes that may be chosen, by their depth, in the order of their widths."""
    depths: dict[int, list[Shape]] = {}
    for shape in sorted(report.expected, key=lambda x: (x.steps, x.width, x.topk)):
        depths.setdefault(shape.steps, []).append(shape)
    return depths


def draw_policy(report: PolicyReport, path: Path) -> None:
    """Write a PNG with a line per depth; the present choice has a ring. Raises PictureError and WriteError."""
    figure = new_figure(9, 4.6)
    figure.suptitle(present_choice(report), fontsize=10)
    milliseconds = {shape: expected.seconds * 1e3 for shape, expected in report.expected.items()}
    gains = {shape: report.gain(shape) for shape in report.expected} if PLAIN in report.expected else report.rates()
    cost, gain = figure.subplots(1, 2)
    titles = ("expected milliseconds of a step", "expected tokens/s over those of plain decoding")
    for axes, title, values in ((cost, titles[0], milliseconds), (gain, titles[1], gains)):
        for colour, (depth, shapes) in zip(COLOURS * len(values), lines_by_depth(report).items(), strict=False):
            widths, heights = [shape.width for shape in shapes], [values[shape] for shape in shapes]
            axes.plot(widths, heights, "o-", color=colour, markersize=4, label=f"depth {depth}" if depth else "plain")
        if report.present in values:
            place = [report.present.width], [values[report.present]]
            axes.plot(*place, "o", markersize=11, markerfacecolor="none", color=PRESENT, label="chosen")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("width: nodes that the target verifies")
        axes.set_ylim(0, 1.1 * max(values.values()))
        axes.spines[["top", "right"]].set_visible(False)
    gain.axhline(1.0, color="#999999", linewidth=0.8)
    cost.legend(fontsize=8, frameon=False)
    with replace_output(path, "name another file with --picture") as partial:
        figure.savefig(partial, format="png")
