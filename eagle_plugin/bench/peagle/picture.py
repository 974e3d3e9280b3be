"""The result of the benchmark of P-EAGLE as a picture: draft time by levels, and the ratio to plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_plugin.bench.peagle.configs import FORMS
from eagle_plugin.bench.peagle.report import PEagleReport, Row
from eagle_plugin.bench.peagle.table import NAMES
from eagle_plugin.bench.picture import PictureError, new_figure, save_figure
from eagle_plugin.bench.report import Quartiles

COLOURS = {"eagle3": "#5b7fa6", "peagle": "#d9662b"}
LINES = {"chain": "-", "tree": "--"}


def draw_peagle(report: PEagleReport, path: Path) -> None:
    """Write a PNG: on the left draft time at the fewest clients over the levels, on the right ratios over the clients.

    Points are medians, bars reach from the first to the third quartile. The ratios are those of the most levels.
    Raises PictureError.
    """
    drafted = [row for row in report.rows if row.spread.draft_ms]
    if not drafted:
        raise PictureError("no picture: it shows draft times, and no server wrote one")
    fewest, most = min(row.concurrency for row in drafted), max(row.k for row in drafted)
    prompts = drafted[0].prompts
    figure = new_figure(10, 4.6)
    figure.suptitle(f"{report.target} in {report.engine} {report.engine_version}", fontsize=13, fontweight="bold")
    times, ratios = figure.subplots(1, 2)
    for kind, colour in COLOURS.items():
        for form in FORMS:
            rows = [row for row in drafted if (row.kind, row.form, row.prompts) == (kind, form, prompts)]
            label, style = f"{NAMES[kind]}, {form}s", {"color": colour, "linestyle": LINES[form]}
            _points(times, [(r.k, r.spread.draft_ms) for r in rows if r.concurrency == fewest], label, style)
            deepest = [(r.concurrency, r.spread.ratio_vs_plain) for r in _by_clients(rows) if r.k == most]
            _points(ratios, deepest, f"{label}, {most} levels", style)
    counts = sorted({row.concurrency for row in drafted})
    times.set_title(f"drafting a round, {fewest} client{'s' if fewest > 1 else ''}", fontsize=11)
    times.set_xlabel("levels")
    times.set_ylabel("milliseconds")
    times.set_xticks(sorted({row.k for row in drafted}))
    times.set_ylim(bottom=0)
    ratios.axhline(1.0, color="#9aa5b1", linewidth=1.2)
    ratios.set_title("tokens per second relative to plain decoding", fontsize=11)
    ratios.set_xlabel("clients")
    ratios.set_xscale("log", base=2)
    ratios.set_xticks(counts, [str(count) for count in counts])
    ratios.minorticks_off()
    for axes in (times, ratios):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    head = "" if report.peagle_is_trained else "untrained P-EAGLE head: draft times only; "
    caption = f"{head}{report.machine.cores} cores, {report.machine.cpu}; {report.date[:10]}"
    save_figure(figure, path, caption)


def _by_clients(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.concurrency)


def _points(axes: Any, points: list[tuple[int, Quartiles | None]], label: str, style: dict[str, Any]) -> None:
    known = sorted(((x, y) for x, y in points if y is not None), key=lambda point: point[0])
    if known:
        whiskers = [[y.median - y.q1 for _, y in known], [y.q3 - y.median for _, y in known]]
        values = [y.median for _, y in known]
        axes.errorbar(
            [x for x, _ in known], values, yerr=whiskers, marker="o", markersize=4, capsize=3, label=label, **style
        )
