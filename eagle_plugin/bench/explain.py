"""`eagle-plugin explain` prints what the policy of a server chooses, what it expects, and what it served."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.policy_sources import SourceError, read_report
from eagle_plugin.common.command_line import Parser
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.prediction_errors import median_error
from eagle_plugin.policy.report import PolicyReport, ShapeTotals, name_of, present_choice, sum_of

DESCRIPTION = """\
Say what the policy of a server chooses and why: what it expects of a step with every shape of the draft trees, how its
predictions are corrected, what the next best shape would give, and how often each shape was served.
"""
EXAMPLES = """\
examples:
  eagle-plugin explain http://127.0.0.1:30000            a running server (SGLang needs --enable-metrics)
  eagle-plugin explain out/logs/plugin.log               the log of a server: its last line of the policy
  kubectl logs POD | eagle-plugin explain -              the same from the standard input
  eagle-plugin explain SOURCE --picture out/policy.png   cost and expected gain over the width of the trees

A shape is steps/topk/width: depth of the tree, children per node, nodes that the target verifies. 0/1/1 is plain
decoding.
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = Parser(prog="eagle-plugin explain", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "source", metavar="SOURCE", help="URL of a server or of its metrics, a log file, or - for stdin"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw cost and expected gain as a PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns 0. Raises SourceError, PictureError and WriteError."""
    options = parse(argv)
    report = read_report(options.source)
    if not report.expected:
        raise SourceError(
            f"{options.source}: the server has no policy (EAGLE_POLICY is {report.mode}): nothing is chosen"
        )
    print_report(report, Console())
    if options.picture is not None:
        from eagle_plugin.bench.policy_picture import draw_policy

        draw_policy(report, options.picture)
    return 0


def print_report(report: PolicyReport, console: Console) -> None:
    """The choice, one row per shape, and the corrections."""
    for line in summary(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(shape_table(report))


def summary(report: PolicyReport) -> list[str]:
    """The choice, what the next best shape would give instead, and how the predictions are corrected."""
    rates, total = report.rates(), sum_of(report.totals.values())
    prefix = report.prefix_tokens / max(report.requests, 1)
    other, lines = report.next_best(), [f"{present_choice(report)} (prefixes of {prefix:,.0f} tokens on average)"]
    if other is not None and report.present in rates:
        lost = rates[other] / rates[report.present] - 1
        lines.append(
            f"{name_of(report.present)} is expected to give {rates[report.present]:,.1f} tokens/s, "
            f"{name_of(other)} instead of it {rates[other]:,.1f} ({lost:+.1%})"
        )
    if report.factors:
        corrected = ", ".join(f"{factor:.2f} at depth {depth}" for depth, factor in enumerate(report.factors, start=1))
        lines.append(f"accepted over predicted tokens: {corrected}")
    if report.reading:
        lines.append(f"to draft, the head reads prompts: {report.reading * 1e3:.2f} ms per output token")
    lines.append(f"a step takes {report.slowdown:.2f} times what was measured at the start")
    if total.timed and total.predicted > 0:
        off = total.seconds / total.predicted - 1
        lines.append(f"{total.timed:,} timed steps took {off:+.1%} against their predictions{_median(report)}")
        if any(report.phases.values()):
            lines.append(_phases(report))
    else:
        lines.append("no step was timed yet: only those between two of the same shape and batch size are")
    return lines


def _median(report: PolicyReport) -> str:
    error = median_error(report.errors)
    return "" if error is None else f"; |measured / predicted - 1| of one step: {error:.1%} in the median"


def _phases(report: PolicyReport) -> str:
    total = sum(report.phases.values())
    parts = ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in report.phases.items())
    return f"of the predicted time of these steps: {parts}"


def shape_table(report: PolicyReport) -> Table:
    """One row per shape, by width; the present choice has a star."""
    served = sum(totals.rounds for totals in report.totals.values())
    caption = f"{served:,} rounds since the server started; * is the present choice"
    table = Table(caption=caption, caption_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("shape")
    for name in ("expected\nms/step", "tokens/\nround", "\ntokens/s", "of\nplain"):
        table.add_column(name, justify="right")
    for name in ("served\nrounds", "tokens/\nround", "\nms/step", "against\nexpected"):
        table.add_column(name, justify="right")
    rates = report.rates()
    for shape in sorted({*report.expected, *report.totals}, key=lambda x: (x.width, x.steps, x.topk)):
        star = "*" if shape == report.present else ""
        cells = [*_expected_cells(report, shape, rates), *_served_cells(report.totals.get(shape), served)]
        table.add_row(f"{shape}{star}", *cells, style="bold" if star else None)
    return table


def _expected_cells(report: PolicyReport, shape: Shape, rates: dict[Shape, float]) -> list[str]:
    expected = report.expected.get(shape)
    if expected is None:
        return [""] * 4
    gain = f"{report.gain(shape):.2f}x" if PLAIN in rates else ""
    return [f"{expected.seconds * 1e3:.2f}", f"{expected.tokens:.2f}", f"{rates[shape]:,.1f}", gain]


def _served_cells(totals: ShapeTotals | None, rounds: int) -> list[str]:
    if totals is None or not totals.rounds:
        return [""] * 4
    cells = [f"{totals.rounds / rounds:.1%}", f"{totals.tokens / totals.rounds:.2f}"]
    if not totals.timed or not totals.predicted > 0:
        return [*cells, "", ""]
    return [*cells, f"{totals.seconds / totals.timed * 1e3:.2f}", f"{totals.seconds / totals.predicted - 1:+.1%}"]
