"""Makes the report: `report.html`, which needs no other file and no script, and `report.md`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from eagle_plugin.bench.states.configs import NAMES
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.learning.report.inputs import Inputs, ReportError, read_inputs
from eagle_plugin.learning.report.pictures import (
    draw_acceptance,
    draw_calibration,
    draw_curve,
    draw_evaluation,
    draw_load,
)
from eagle_plugin.learning.report.svg import Picture
from eagle_plugin.learning.report.tables import (
    aiperf_tables,
    cautions,
    evaluation_tables,
    load_tables,
    ratio_table,
    repeat_tables,
    source_tables,
    training_table,
)

HTML, MARKDOWN = "report.html", "report.md"
LARGEST = 3_000_000  # bytes of the page, so that it can be sent by mail
TEMPLATES = Path(__file__).parent / "templates"
FIX = "name another folder"


def write_report(
    folder: Path, curve: Path | None = None, evaluation: Path | None = None, out: Path | None = None
) -> list[Path]:
    """Write report.html and report.md from the states.json in `folder`; returns their paths.

    Args:
        curve: `logs/curve.json` of the training (None: the one below `folder`, if there is one).
        evaluation: `FILE-details.json` of `eagle-plugin eval` (None: likewise).
        out: the folder of both files (None: `folder`).

    Raises:
        ReportError: an input is missing or has another form, or the page would be too large.
        WriteError: a file cannot be written.
    """
    inputs = read_inputs(folder, curve, evaluation)
    pages = {HTML: render_html(inputs), MARKDOWN: render_markdown(inputs)}
    size = len(pages[HTML].encode())
    if size > LARGEST:
        raise ReportError(
            f"{folder}: the page would have {size:,} bytes, wanted at most {LARGEST:,}; benchmark fewer sets of prompts"
        )
    paths = [(out or folder) / name for name in pages]
    for path, text in zip(paths, pages.values(), strict=True):
        write_output(path, [text], FIX)
    return paths


def render_html(inputs: Inputs) -> str:
    """The page. Text of users is escaped by jinja2; only the pictures' own markup is not."""
    environment = _environment(autoescape=True)
    return environment.get_template("page.html.j2").render(**_content(inputs), **_pictures(inputs))


def render_markdown(inputs: Inputs) -> str:
    """The same without pictures."""
    environment = _environment(finalize=_markdown)
    environment.filters["trusted"] = _Trusted
    environment.filters["code"] = lambda text: _Trusted(" ".join(text.split()))
    text = environment.get_template("page.md.j2").render(**_content(inputs))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _environment(**options: Any) -> Any:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ReportError(f"the report needs {error.name}, which is not installed; run: pip install jinja2") from None
    loader = FileSystemLoader(TEMPLATES)
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)


def _content(inputs: Inputs) -> dict[str, Any]:
    states = inputs.states
    training = training_table(states.heads)
    return {
        "title": f"Trained draft head for {states.target.get('name', 'the target')}",
        "verdict": states.verdict,
        "configurations": [
            ("no EAGLE", "the target alone"),
            *(
                (NAMES[state], head.name + (f" ({head.kind})" if head.kind else ""))
                for state, head in states.heads.items()
            ),
        ],
        "cautions": cautions(states),
        "load": load_tables(states),
        "aiperf": aiperf_tables(states),
        "ratios": ratio_table(states),
        "evaluation": evaluation_tables(inputs.evaluation),
        "training": [*([training] if training else []), *source_tables(states.heads)],
        "repeat": list(repeat_tables(states)),
        "command": shlex.join(["eagle-plugin", "benchmark", *states.command]),
    }


def _pictures(inputs: Inputs) -> dict[str, list[Picture]]:
    """By section; empty lists where an optional input is missing."""
    return {
        "load_pictures": list(draw_load(inputs.states)),
        "acceptance_pictures": [*draw_acceptance(inputs.states), *draw_evaluation(inputs.evaluation or {})],
        "calibration_pictures": list(draw_calibration(inputs.states)),
        "curve_pictures": list(draw_curve(inputs.curve)) if inputs.curve else [],
    }


class _Trusted:
    """Text that is Markdown already."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def _markdown(value: Any) -> Any:
    """Text for Markdown: nothing in it is markup, HTML or the end of a table's cell."""
    if not isinstance(value, str):
        return value
    text = re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", " ".join(value.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
