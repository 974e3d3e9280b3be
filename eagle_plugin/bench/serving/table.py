"""Prints the result of the serving benchmark: its table, and its summary in sentences."""

from __future__ import annotations

from rich.table import Table

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.serving.configs import CONFIGS
from eagle_plugin.bench.serving.report import Row, ServingReport, WorstRow
from eagle_plugin.bench.tables import number, plain_table, with_quartiles

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
    table = plain_table(
        f"{report.target}, {report.engine} {report.engine_version}, bf16: output tokens per second",
        "medians \\[quartiles], ratios repeat by repeat; chain, tree: the engine's own worker; best: the fastest of "
        "plain, chain and tree; CPU: processor time per token, plugin / the least of these; "
        f"{report.settings.threads} threads on {report.machine.cpu}",
        ("clients", "T", "prompts", *(COLUMNS.get(c, c) for c in shown), "plugin\n/ best", "/ fixed", "CPU"),
        left=("prompts",),
    )
    for row in report.rows:
        table.add_row(
            str(row.concurrency),
            f"{row.temperature:g}",
            row.prompts,
            *(number(getattr(row, config), 1) for config in shown),
            with_quartiles(row.spread.ratio_vs_best_alternative, between="\n"),
            number(row.ratio_vs_fixed),
            number(row.cpu_ratio_vs_best_alternative),
        )
    return table


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
    lines.append(report.steal.sentence())
    busiest = max(report.rows, key=lambda row: row.others)
    used = f"other processes used at most {busiest.others:.0%} of the machine during a measurement"
    lines.append(f"{used} ({_cell(busiest)})")
    return lines


def _cell(row: Row | WorstRow) -> Cell:
    return Cell(row.concurrency, row.temperature, row.prompts)
