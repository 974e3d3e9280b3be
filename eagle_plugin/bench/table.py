"""Prints the result of the demo: one table, and bars of the speeds."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.measure import RepeatSeries
from eagle_plugin.bench.quartiles import quartiles, ratio_quartiles
from eagle_plugin.bench.report import DemoReport
from eagle_plugin.bench.spec import Mode
from eagle_plugin.bench.tables import with_quartiles

BAR_WIDTH = 30  # characters of the longest bar; a line fits 80 characters


def demo_table(report: DemoReport) -> Table:
    """One column each for plain decoding, the engine's own speculation and the plugin; fits 80 characters.

    All but the comparison in fp32, which comes later: `verdict_sentence`.
    """
    settings, spreads, equality = report.settings, report.spread, report.equality
    table = Table(
        title=f"{report.target}, {report.engine} {report.engine_version}, bf16, one request at a time, greedy",
        caption=(
            f"medians of {settings.repeats} interleaved repeats \\[quartiles], {settings.prompts_measured} questions, "
            f"{settings.threads} threads on {report.machine.cpu}"
        ),
    )
    table.add_column("steps/topk/nodes")
    table.add_column("plain decoding\n-", justify="right")
    table.add_column(f"engine's {settings.algorithm}\n{settings.builtin_shape}", justify="right")
    table.add_column(f"eagle-plugin\n{settings.plugin_shape}", justify="right", style="bold")
    three = (report.plain, report.builtin, report.plugin)
    rates = (spreads.plain_tokens_per_s, spreads.builtin_tokens_per_s, spreads.plugin_tokens_per_s)
    table.add_row("tokens/s", *(with_quartiles(one, 1) for one in rates))
    table.add_row("TPOT, ms", *(f"{one.tpot_ms:.1f}" for one in three))
    table.add_row("TTFT, ms", *(f"{one.ttft_ms:.0f}" for one in three))
    table.add_row("accept length", "1", f"{report.builtin.accept_length:.2f}", f"{report.plugin.accept_length:.2f}")
    gains = (spreads.builtin_speedup_vs_plain, spreads.speedup_vs_plain)
    table.add_row("against plain", "1.00x", *(with_quartiles(one, unit="x") for one in gains))
    table.add_row("against engine", "", "1.00x", with_quartiles(spreads.speedup_vs_builtin, unit="x"))
    of = equality.bf16_compared
    table.add_row("same text, bf16", "", f"{equality.bf16_builtin_equal}/{of}", f"{equality.bf16_plugin_equal}/{of}")
    return table


def speed_sentence(report: DemoReport) -> str:
    """The two ratios of speed."""
    return (
        f"[bold]{report.speedup_vs_plain:.2f}x[/] plain decoding, "
        f"[bold]{report.speedup_vs_builtin:.2f}x[/] the engine's {report.settings.algorithm}"
    )


def verdict_sentence(report: DemoReport) -> str:
    """The two ratios of speed, and how many greedy texts are the same in fp32."""
    equality = report.equality
    compared = f"{equality.equal} of {equality.compared} greedy texts in fp32 are those of plain decoding"
    return f"{speed_sentence(report)}; " + ("no texts were compared in fp32" if equality.not_compared else compared)


def repeats_sentence(repeats: int, max_repeats: int, reason: str) -> str:
    """How many repeats were made, and why not more."""
    if repeats == max_repeats:
        return f"{repeats} repeats, as many as were wanted"
    return f"{repeats} of at most {max_repeats} repeats: {reason}; --thorough makes all of them"


def print_bars(series: Mapping[Mode, RepeatSeries], names: Mapping[Mode, str], console: Console) -> None:
    """One bar per server: the median speed, its quartiles, and the ratio to plain decoding."""
    rates = {mode: quartiles(one.tokens_per_s) for mode, one in series.items()}
    longest = max(one.median for one in rates.values())
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    table = Table.grid(padding=(0, 1))
    for mode, rate in rates.items():
        ratio = ratio_quartiles(series[mode].tokens_per_s, series["plain"].tokens_per_s)
        bar = block * max(1, round(BAR_WIDTH * rate.median / longest))
        style = "bold green" if mode == "plugin" else "blue"
        table.add_row(names[mode], f"[{style}]{bar}[/]", f"{with_quartiles(rate, 1)} tokens/s", f"{ratio.median:.2f}x")
    console.print(table)
