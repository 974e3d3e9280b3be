"""The table at the end of a generation run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from eagle_plugin.learning.data.generation.endpoints import TargetEndpoint
from eagle_plugin.learning.data.generation.journal import Journal
from eagle_plugin.learning.data.generation.run import GenerationStats

CUT_SHARE = 0.2  # of the answers; if more end by their length, a warning says so


def cut_answers(stats: GenerationStats, max_tokens: int) -> str | None:
    """A warning if many answers of a run end because they were as long as they may be."""
    kept = sum(stats.rows.values())
    cut = sum(count for (_, _, finish), count in stats.rows.items() if finish == "length")
    if cut <= CUT_SHARE * kept:
        return None
    return (
        f"{cut / kept:.0%} of the answers were cut at {max_tokens} tokens: a head learns nothing of what the target "
        "writes later, with a reasoning target the final answers; raise --max-tokens (generate.max_tokens in a job)"
    )


def summary_table(stats: GenerationStats, endpoints: Sequence[TargetEndpoint], journal: Journal) -> Table:
    """The counts of one run."""
    table = Table("what", "count", "", title=f"{journal.out}", title_justify="left")
    kept = sum(stats.rows.values())
    for (source, temperature, finish), count in sorted(stats.rows.items(), key=str):
        table.add_row(escape(f"{source}, temperature {temperature}, {finish}"), f"{count:,}", f"{count / kept:.1%}")
    table.add_row("rows kept", f"{kept:,}", "100.0%" if kept else "-", style="bold")
    for kind, count in stats.skipped.most_common():
        table.add_row(f"no row: {kind}", f"{count:,}", escape(stats.reasons[kind]), style="yellow")
    if journal.resumed:
        table.add_row("prompts done by earlier runs", f"{journal.resumed:,}", "")
    rate = stats.response_tokens / max(stats.seconds, 1e-9)
    table.add_row("response tokens", f"{stats.response_tokens:,}", f"{rate:,.0f} tokens/s")
    table.add_row("prompt tokens", f"{stats.prompt_tokens:,}", "")
    for endpoint in endpoints:
        table.add_row(escape(endpoint.name), "left out" if endpoint.dead else "served", escape(endpoint.dead))
    return table
