"""Draws two answers side by side as an animated SVG: each piece of text appears when it arrived in the demo.

The speeds are those of the run. Where nothing moves (print, most editors) the whole answers are seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten, wrap
from xml.sax.saxutils import escape

from eagle_plugin.bench.report import DemoReport, ShownAnswer
from eagle_plugin.common.atomic_io import replace_file

COLUMNS = 54  # characters of a line
WIDTH, PANEL, MARGIN = 860, 420, 10  # pixels: of the picture, of a panel, around them
LINE, FIRST_LINE = 17, 72  # pixels: between two lines, and above the first one
PAUSE = 3.0  # seconds in which both answers stay
STYLE = """
    text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; }
    .paper { fill: #ffffff; stroke: #d0d7de; }
    .title { font: bold 13px sans-serif; } .ours { fill: #bc4c00; }
    .note { font: 11px sans-serif; fill: #59636e; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .ours { fill: #ffa657; } .note { fill: #9198a1; }
      .paper { fill: #0d1117; stroke: #3d444d; }
    }"""

Line = list[tuple[float, str]]  # the parts of a line of text: seconds after the request, and what arrived


def draw_answers(report: DemoReport, path: Path) -> None:
    """Write the animation of the first question that the demo showed to an SVG file, whole or not at all.

    Raises ValueError if the report has no answers, OSError if the file cannot be written.
    """
    if not report.shown:
        raise ValueError("the report has no answers as they arrived")
    asked = report.shown[0]
    lines = [wrapped(answer) for answer in asked.answers]
    height = FIRST_LINE + LINE * max(map(len, lines)) + 2 * MARGIN
    seconds = PAUSE + max(answer.pieces[-1][0] for answer in asked.answers)
    caption = (
        f"{report.target}, {report.engine} {report.engine_version}, bf16, greedy, one server at a time; "
        f"{report.machine.cores} cores, {report.machine.cpu}; {report.date[:10]}"
    )
    with replace_file(path) as partial:
        partial.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 24}" width="{WIDTH}">\n'
            f"  <title>{escape(asked.prompt)}</title>\n  <style>{STYLE}\n  </style>\n"
            f'  <rect class="paper" width="{WIDTH}" height="{height + 24}" rx="6">'
            f'<set id="loop" attributeName="display" to="inline" begin="0s;loop.end" dur="{seconds:.2f}s"/></rect>\n'
            f'  <text class="title" x="{MARGIN}" y="24">{escape(shorten(asked.prompt, 110))}</text>\n'
            + "".join(
                panel(answer, lines[index], MARGIN + index * PANEL, "title ours" if index else "title")
                for index, answer in enumerate(asked.answers)
            )
            + f'  <text class="note" x="{MARGIN}" y="{height + 12}">{escape(caption)}</text>\n</svg>\n',
            encoding="utf-8",
        )


def panel(answer: ShownAnswer, lines: Sequence[Line], left: int, style: str) -> str:
    """One answer: its title with the speed, and its lines, whose parts are hidden until they arrive."""
    rows = [f'  <text class="{style}" x="{left}" y="48">{escape(f"{answer.title}: {answer.speed}")}</text>\n']
    for row, line in enumerate(lines):
        parts = "".join(
            f'<tspan>{escape(text)}<set attributeName="visibility" to="hidden" '
            f'begin="loop.begin" dur="{at:.2f}s"/></tspan>'
            for at, text in line
        )
        rows.append(f'  <text x="{left}" y="{FIRST_LINE + LINE * row}" xml:space="preserve">{parts}</text>\n')
    return "".join(rows)


def wrapped(answer: ShownAnswer) -> list[Line]:
    """The lines of an answer, of at most `COLUMNS` characters, in parts that arrived together."""
    arrived = iter([at for at, piece in answer.pieces for _ in piece])
    return [list(in_parts(line, arrived)) for line in broken("".join(piece for _, piece in answer.pieces))]


def broken(text: str) -> Iterator[str]:
    """The lines of a text, long ones broken between words; together they are the text, with its line ends."""
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        pieces = wrap(body, COLUMNS, drop_whitespace=False, replace_whitespace=False, expand_tabs=False) or [""]
        yield from pieces[:-1]
        yield pieces[-1] + line[len(body) :]


def in_parts(line: str, arrived: Iterator[float]) -> Iterator[tuple[float, str]]:
    """A line in parts of one time each; `arrived` has the time of each of its characters, and of all later ones."""
    part, since = "", 0.0
    for character in line:
        at = next(arrived)
        if part and at != since:
            yield since, part
            part = ""
        part, since = part + (character if character.isprintable() else " " if character == "\t" else ""), at
    if part:
        yield since, part
