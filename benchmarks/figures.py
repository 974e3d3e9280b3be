"""Draws the figures of the documents from the reports in docs/figures, light and dark: `make figures`.

docs/figures/NAME.json is a report of a benchmark, or the part of it that its figure shows; docs/images/NAME.png and
NAME-dark.png are drawn from it. `--record out/NAME.json` takes a new report first. Figures without a report stay.
answers.json is the part of a demo's report with the answers as they arrived, answers.svg its animation; `--answers
out/demo.json` takes it from a new demo.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peagle_report import draw_peagle
from eagle_plugin.bench.animation import draw_answers
from eagle_plugin.bench.picture import draw_demo
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.errors import UserError

DOCS = Path(__file__).resolve().parents[1] / "docs"
FIGURES: dict[str, Callable[[Any, Path], None]] = {"demo": draw_demo, "peagle": draw_peagle}
PAPER, INK = "#0d1117", "#e6edf3"
DARK = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


class FigureError(UserError):
    """A figure cannot be drawn; one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, nargs="+", default=[], metavar="FILE", help=f"one of {names()}")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="demo.json, for the answers side by side")
    options = parser.parse_args(argv)
    try:
        if options.answers is not None:
            record_answers(options.answers, DOCS)
        for file in options.record:
            record(file, DOCS)
        print("\n".join(draw_all(DOCS)))
    except UserError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 1
    return 0


def names() -> str:
    return ", ".join(f"{name}.json" for name in FIGURES)


def record(file: Path, docs: Path) -> None:
    """Take a report as the one of its figure, unless that cannot be drawn from it. Raises FigureError."""
    if file.stem not in FIGURES or file.suffix != ".json":
        raise FigureError(f"no figure is drawn from {file}: wanted {names()}")
    kept = docs / "figures" / file.name
    before = kept.read_bytes() if kept.exists() else None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(file.read_bytes())
        draw(file.stem, docs)
    except (OSError, FigureError) as error:
        kept.unlink(missing_ok=True) if before is None else kept.write_bytes(before)
        raise FigureError(str(error)) from None


def record_answers(file: Path, docs: Path) -> None:
    """Take the answers of a demo's report. Raises FigureError."""
    try:
        report = json.loads(file.read_text("utf-8"))
        kept = {name: report[name] for name in ("date", "engine", "engine_version", "target", "machine")}
        kept["shown"] = report["shown"][:1]
        draw_answers(as_report(json.dumps(kept)), docs / "images/answers.svg")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise FigureError(f"{file} is no report of a demo with answers: {error}") from None
    write_output(docs / "figures/answers.json", [json.dumps(kept, indent=1) + "\n"])


def draw_all(docs: Path) -> Iterator[str]:
    """Draw every figure that has a report; one line per figure. Raises FigureError."""
    for image in sorted((docs / "images").glob("*.png")):
        if not image.stem.endswith("-dark") and not (docs / "figures" / f"{image.stem}.json").exists():
            yield f"docs/images/{image.name} stays as it is: there is no docs/figures/{image.stem}.json"
    for name in FIGURES:
        if (docs / "figures" / f"{name}.json").exists():
            draw(name, docs)
            yield f"docs/images/{name}.png and {name}-dark.png are drawn"
    if (docs / "figures/answers.json").exists():
        record_answers(docs / "figures/answers.json", docs)
        yield "docs/images/answers.svg is drawn"


def draw(name: str, docs: Path) -> None:
    """Draw one figure from its report, light and dark. Raises FigureError."""
    import matplotlib

    file = docs / "figures" / f"{name}.json"
    try:
        report = as_report(file.read_text("utf-8"))
        for suffix, style in (("", nullcontext()), ("-dark", matplotlib.rc_context(DARK))):
            with style:
                FIGURES[name](report, docs / "images" / f"{name}{suffix}.png")
    except (ValueError, AttributeError, TypeError) as error:
        raise FigureError(f"{file} is no report of this figure: {error}") from None


def as_report(text: str) -> Any:
    """A report whose fields are attributes, with those alone that the text has."""
    return json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields))


if __name__ == "__main__":
    sys.exit(main())
