"""The simulator's prediction as a picture: speed-up by concurrency, one panel per device and target."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle_plugin.common.atomic_io import replace_file

COLOURS = ("#d9662b", "#9aa5b1", "#5b7fa6", "#7a9e7e", "#3f6b4f", "#8c6bb1")


class PredictedRow(Protocol):
    """The fields of `benchmarks.simulate.Row` that are drawn."""

    device: str
    target: str
    acceptance: str
    requests: int
    speed_ups: dict[str, float]


def draw(rows: Sequence[PredictedRow], verdict: str, path: Path) -> None:
    """Write a PNG; the verdict on the simulator is above the panels."""
    devices = list(dict.fromkeys(row.device for row in rows))
    cases = list(dict.fromkeys((row.target, row.acceptance) for row in rows))
    figure = Figure(figsize=(4.2 * len(cases), 3.2 * len(devices) + 1.2), dpi=110)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    title = "SIMULATED speed-up over plain decoding; no GPU was used"
    figure.suptitle(title + "\n" + textwrap.fill(verdict, 40 * len(cases)), fontsize=10)
    panels = figure.subplots(len(devices), len(cases), squeeze=False, sharex=True)
    for line, device in zip(panels, devices, strict=True):
        for axes, (target, acceptance) in zip(line, cases, strict=True):
            mine = [row for row in rows if (row.device, row.target, row.acceptance) == (device, target, acceptance)]
            for name, colour in zip(mine[0].speed_ups, COLOURS, strict=True):
                width = 2.5 if name == "policy" else 1.2
                values = [row.speed_ups[name] for row in mine]
                axes.plot([row.requests for row in mine], values, color=colour, linewidth=width, label=name)
            axes.axhline(1.0, color="#222222", linewidth=0.6)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{target} on {device}\n({acceptance.partition(':')[0]})", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("concurrent requests")
    panels[0][0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary:
        figure.savefig(temporary, format="png")
