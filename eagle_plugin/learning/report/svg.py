"""Pictures as SVG inside a page: without links, with a text alternative, in colours that colour-blind readers tell."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_plugin.learning.report.inputs import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), without the yellow, which is too light for lines on white.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-", "-.", ":", "--", "-.")
WIDTH, HEIGHT = 4.6, 3.1  # inches; a picture is as wide as a phone, and two are beside each other on a desk
LEGEND = 62  # characters in the width of a picture


class Picture(NamedTuple):
    """One picture of the page."""

    title: str
    svg: str  # the element, trusted: no text of a user is in it unescaped
    alternative: str  # what it shows, in words and numbers


def style(place: int) -> dict[str, Any]:
    """Colour, marker and line of the n-th series; each tells it from the others without the other two."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place % len(LINES)],
        "markersize": 5.5,
        "linewidth": 1.6,
    }


def draw(name: str, title: str, alternative: str, plot: Callable[[Axes], None]) -> Picture:
    """A picture with one pair of axes, which `plot` fills; name: of its ids, unique on the page.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(
            f"the report needs {error.name}, which is not installed; run: pip install {error.name}"
        ) from None
    # The same numbers give the same bytes, and text stays text.
    settings: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10, "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        plot(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            columns = max(1, LEGEND // (max(map(len, labels)) + 7))  # 7: the line and the gap beside a label
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return Picture(title, _for_page(text.getvalue(), name), alternative)


def _for_page(text: str, name: str) -> str:
    """The svg element alone: its ids are unique on the page, and nothing in it names an address."""
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    # Inside HTML the namespaces are known, and the picture is as wide as its place. The text beside it says the same.
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = rest.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    return f'<svg {box[0]} role="presentation" aria-hidden="true" focusable="false">{rest}'
