"""The result of the benchmark for a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from eagle_plugin.bench.report import Quartiles
from eagle_plugin.bench.states.configs import NAMES
from eagle_plugin.bench.states.document import StatesReport

COLUMNS = ("TTFT\nms", "TPOT\nms", "ITL\nms", "req/s", "tokens/s", "OTPS", "accept")
DIGITS = (0, 1, 1, 2, 1, 1, 2)


def states_table(report: StatesReport) -> Table:
    """One row per state and cell with the medians over the repeats."""
    table = _table(
        escape(f"{report.target['name']}, {report.engine} {report.engine_version}, {report.settings.dtype}"),
        "medians over the repeats; tokens/s of all clients, OTPS of one request; accept: tokens per round",
    )
    for name in ("clients", *COLUMNS):
        table.add_column(name, justify="right")
    for row in report.rows:
        values = (row.ttft_ms, row.tpot_ms, row.itl_ms, row.requests_per_s, row.tokens_per_s, row.otps)
        shown = map(_median, (*values, row.accept_length), DIGITS)
        table.add_row(NAMES[row.state], escape(row.prompts), str(row.concurrency), *shown)
    return table


def aiperf_table(report: StatesReport) -> Table:
    """What aiperf measured, in the same columns."""
    table = _table("the same load by aiperf, once", "tokens/s of the whole run, its end with fewer clients included")
    for name in ("clients", *COLUMNS[:-1]):
        table.add_column(name, justify="right")
    for row in report.aiperf:
        values = (row.ttft_ms, row.tpot_ms, row.itl_ms, row.requests_per_s, row.tokens_per_s, row.otps)
        shown = (f"{value:.{digits}f}" for value, digits in zip(values, DIGITS, strict=False))
        table.add_row(NAMES[row.state], escape(row.prompts), str(row.concurrency), *shown)
    return table


def _table(title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("configuration", "prompts"):
        table.add_column(name)
    return table


def _median(values: Quartiles | None, digits: int) -> str:
    return "-" if values is None else f"{values.median:.{digits}f}"
