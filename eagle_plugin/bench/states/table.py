"""The result of the benchmark for a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from eagle_plugin.bench.report import Quartiles
from eagle_plugin.bench.states.configs import NAMES
from eagle_plugin.bench.states.document import StatesReport

COLUMNS = ("TTFT\nms", "TPOT\nms", "ITL\nms", "req/s", "tokens/s", "OTPS", "accept")


def states_table(report: StatesReport) -> Table:
    """One row per state and cell with the medians over the repeats."""
    table = Table(
        title=escape(f"{report.target['name']}, {report.engine} {report.engine_version}, {report.settings.dtype}"),
        caption="medians over the repeats; tokens/s of all clients, OTPS of one request; accept: tokens per round",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    for name in ("configuration", "prompts"):
        table.add_column(name)
    for name in ("clients", *COLUMNS):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            NAMES[row.state],
            escape(row.prompts),
            str(row.concurrency),
            *(
                _median(values, digits)
                for values, digits in (
                    (row.ttft_ms, 0),
                    (row.tpot_ms, 1),
                    (row.itl_ms, 1),
                    (row.requests_per_s, 2),
                    (row.tokens_per_s, 1),
                    (row.otps, 1),
                    (row.accept_length, 2),
                )
            ),
        )
    return table


def _median(values: Quartiles | None, digits: int) -> str:
    return "-" if values is None else f"{values.median:.{digits}f}"
