"""The result of the benchmark of P-EAGLE for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from eagle_plugin.bench.peagle.report import PEagleReport
from eagle_plugin.bench.serving.table import steal_sentence

AIM = 1.3  # below it more levels cost little: draft time of 11 levels over that of 3
NAMES = {"plain": "plain", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}


def peagle_table(report: PEagleReport) -> Table:
    """One row per server and number of clients."""
    untrained = "" if report.peagle_is_trained else "the P-EAGLE head is untrained: its draft ms alone count; "
    table = Table(
        title=f"{report.target}, {report.engine} {report.engine_version}, bf16: output tokens per second",
        caption=(
            f"{untrained}medians, ratios repeat by repeat; draft: ms per round of the batch; "
            f"{report.settings.threads} threads on {report.machine.cpu}"
        ),
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    for name in ("clients", "head", "shape", "tokens/s", "accept", "draft ms", "/ plain", "/ EAGLE-3", "MiB", "others"):
        table.add_column(name, justify="left" if name in ("head", "shape") else "right")
    for row in sorted(report.rows, key=lambda row: row.concurrency):
        table.add_row(
            str(row.concurrency),
            NAMES[row.kind],
            f"{row.form}s" if row.kind == "plain" else row.shape,  # beside which it was measured
            f"{row.tokens_per_s:.1f}",
            _number(row.accept_length),
            _number(row.draft_ms),
            _number(row.ratio_vs_plain),
            _number(row.ratio_vs_eagle3),
            f"{row.memory_mib:.0f}",
            f"{row.others:.0%}",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary_lines(report: PEagleReport) -> list[str]:
    """The results in sentences."""
    lines = []
    ours, theirs = report.draft_time_ratio_k11_over_k3, report.draft_time_ratio_k11_over_k3_eagle3
    if ours is None:
        lines.append("the draft time of 11 levels over that of 3 is unknown: measure chains with --ks 3 11")
    else:
        verdict = "below" if ours < AIM else "not below"
        other = "" if theirs is None else f"; EAGLE-3 {theirs:.2f}"
        lines.append(f"draft time of 11 levels over that of 3: P-EAGLE {ours:.2f}, {verdict} {AIM}{other}")
    if not report.peagle_is_trained:
        lines.append("the P-EAGLE head is untrained: its tokens per second and accept length say nothing")
    lines.append(steal_sentence(report.steal))
    busiest = max(row.others for row in report.rows)
    lines.append(f"other processes used at most {busiest:.0%} of the machine during a measurement")
    return lines
