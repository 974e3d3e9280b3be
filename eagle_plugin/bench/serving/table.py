"""The result of the serving benchmark for a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from eagle_plugin.bench.report import Quartiles
from eagle_plugin.bench.serving.configs import CONFIGS
from eagle_plugin.bench.serving.plan import Cell
from eagle_plugin.bench.serving.report import Row, ServingReport, StealCount, WorstRow

NAMES = {
    "plain": "plain",
    "builtin_chain": "engine's chain",
    "builtin_tree": "engine's tree",
    "fixed": "plugin, fixed",
    "plugin": "plugin",
}


COLUMNS = {"builtin_chain": "chain", "builtin_tree": "tree"}  # short names: the table fits 80 characters


def serving_table(report: ServingReport) -> Table:
    """One row per cell: tokens per second of each server, and the plugin's ratios."""
    shown = [config for config in CONFIGS if any(getattr(row, config) is not None for row in report.rows)]
    table = Table(
        title=f"{report.target}, {report.engine} {report.engine_version}, bf16: output tokens per second",
        caption=(
            "medians \\[quartiles], ratios repeat by repeat; chain, tree: the engine's own worker; best: the fastest "
            "of plain, chain and tree; CPU: processor time per token, plugin / the least of these; "
            f"{report.settings.threads} threads on {report.machine.cpu}"
        ),
        box=box.SIMPLE_HEAD,
        padding=0,  # the box separates the columns by a space
        pad_edge=False,
        show_edge=False,
    )
    for name in ("clients", "T", "prompts", *(COLUMNS.get(config, config) for config in shown)):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    for name in ("plugin\n/ best", "/ fixed", "CPU"):
        table.add_column(name, justify="right")
    for row in report.rows:
        rates = (getattr(row, config) for config in shown)
        table.add_row(
            str(row.concurrency),
            f"{row.temperature:g}",
            row.prompts,
            *("-" if rate is None else f"{rate:.1f}" for rate in rates),
            _range(row.spread.ratio_vs_best_alternative),
            _number(row.ratio_vs_fixed),
            _number(row.cpu_ratio_vs_best_alternative),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(values: Quartiles | None) -> str:
    return "-" if values is None else escape(f"{values.median:.2f}\n[{values.q1:.2f}-{values.q3:.2f}]")


def summary_lines(report: ServingReport) -> list[str]:
    """The summary in sentences."""
    lines, summary = [], report.summary
    if summary.geometric_mean_ratio_1_to_4 is not None:
        lines.append(f"plugin / best, geometric mean at 1 to 4 clients: {summary.geometric_mean_ratio_1_to_4:.3f}")
    for name, worst in (("best", summary.worst_row), ("fixed", summary.worst_row_vs_fixed)):
        if worst is not None:
            lines.append(f"plugin / {name}, the lowest: {worst.ratio:.3f} ({_cell(worst)})")
    if summary.prediction_error is not None:
        lines.append(
            f"predicted time of a step: off by {summary.prediction_error:.1%} in the median of the timed steps"
        )
    lines.append(steal_sentence(report.steal))
    busiest = max(report.rows, key=lambda row: row.others)
    used = f"other processes used at most {busiest.others:.0%} of the machine during a measurement"
    lines.append(f"{used} ({_cell(busiest)})")
    return lines


def _cell(row: Row | WorstRow) -> Cell:
    return Cell(row.concurrency, row.temperature, row.prompts)


def steal_sentence(steal: StealCount) -> str:
    """How much of the measurement had steal."""
    if steal.over_limit_share is None:
        return "steal is unknown on this machine"
    return (
        f"steal: {steal.over_limit} of {steal.spans} measured spans ({steal.over_limit_share:.0%}) had more than "
        f"{steal.limit:.0%}; {steal.repeated} were measured again"
    )
