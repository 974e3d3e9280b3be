"""Prints the result of the benchmark of a trained head, and what aiperf measured."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from eagle_plugin.bench.states.configs import NAMES
from eagle_plugin.bench.states.document import MEDIANS, StatesReport
from eagle_plugin.bench.tables import number, plain_table

NAMED = ("configuration", "prompts")
COLUMNS = ("TTFT\nms", "TPOT\nms", "ITL\nms", "req/s", "tokens/s", "OTPS", "accept")
DIGITS = (0, 1, 1, 2, 1, 1, 2)


def states_table(report: StatesReport) -> Table:
    """One row per state and cell with the medians over the repeats."""
    table = plain_table(
        escape(f"{report.target['name']}, {report.engine} {report.engine_version}, {report.settings.dtype}"),
        "medians over the repeats; tokens/s of all clients, OTPS of one request; accept: tokens per round",
        (*NAMED, "clients", *COLUMNS),
        left=NAMED,
    )
    for row in report.rows:
        values = (getattr(row, name) for name in MEDIANS)
        shown = (number(value and value.median, digits) for value, digits in zip(values, DIGITS, strict=True))
        table.add_row(NAMES[row.state], escape(row.prompts), str(row.concurrency), *shown)
    return table


def aiperf_table(report: StatesReport) -> Table:
    """What aiperf measured, in the same columns."""
    caption = "tokens/s of the whole run, its end with fewer clients included"
    table = plain_table("the same load by aiperf, once", caption, (*NAMED, "clients", *COLUMNS[:-1]), left=NAMED)
    for row in report.aiperf:
        shown = (number(getattr(row, name), digits) for name, digits in zip(MEDIANS[:-1], DIGITS, strict=False))
        table.add_row(NAMES[row.state], escape(row.prompts), str(row.concurrency), *shown)
    return table
