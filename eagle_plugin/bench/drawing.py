"""Draws what the pictures of all benchmarks share: a figure, points with their quartiles, and plain axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_plugin.bench.quartiles import Quartiles
from eagle_plugin.common.atomic_io import replace_file
from eagle_plugin.common.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#9aa5b1"  # plain decoding


class PictureError(UserError):
    """The picture cannot be drawn here."""


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of that size in inches. Raises PictureError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError(
            f"no picture: {error.name} is not installed; use the engine's environment (`make env`, `make env-vllm`) "
            "or: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.08)
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def save_figure(figure: Figure, path: Path, caption: str = "") -> None:
    """Write the figure to a PNG file, whole or not at all, with small text below it. Raises OSError."""
    if caption:
        figure.supxlabel(caption, fontsize=8.5, alpha=0.75)
    with replace_file(path) as partial:
        figure.savefig(partial, format="png")


def whiskers(values: Sequence[Quartiles]) -> list[list[float]]:
    """The distances from the medians to the quartiles, as `errorbar` takes them."""
    return [[value.median - value.q1 for value in values], [value.q3 - value.median for value in values]]


def draw_points(axes: Any, points: Sequence[tuple[float, Quartiles | None]], label: str, **style: Any) -> None:
    """A line through the medians over x, with a bar from the first to the third quartile; None is left out."""
    known = [(x, value) for x, value in points if value is not None]
    if known:
        values = [value for _, value in known]
        axes.errorbar(
            [x for x, _ in known],
            [value.median for value in values],
            **{"yerr": whiskers(values), "marker": "o", "markersize": 4, "capsize": 3, "label": label, **style},
        )


def over_clients(axes: Any, counts: Sequence[int], title: str) -> None:
    """Ratios to plain decoding over numbers of clients, which are on a logarithmic axis."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(counts) / 1.3, max(counts) * 1.3)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("clients")
    axes.set_title(title, fontsize=11)


def finish_axes(axes: Any) -> None:
    """No frame above and to the right, and a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
