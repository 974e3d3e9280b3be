"""What `data collect` and `data features --endpoint` have in common: the end of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from eagle_plugin.common.progress import ProgressBars, report_progress
from eagle_plugin.learning.data.collecting.completion import GrowingStore, is_stored
from eagle_plugin.learning.data.collecting.given import collect_given
from eagle_plugin.learning.data.generation.run import GenerationSettings
from eagle_plugin.learning.data.rows import TokenRow

Rows = Callable[[], Iterable[TokenRow]]


@dataclass
class Completed:
    """The counts of a collection."""

    wanted: int = 0  # rows that become documents
    before: int = 0  # of them those that were in the store when this run began
    short: int = 0  # rows that are too long for the store: no response is left of them
    given: int = 0  # rows that were asked for as prompt and answer
    refused: dict[str, str] = field(default_factory=dict)
    missing: int = 0  # that did not reach the store
    documents: int = 0  # in the store
    lost: list[str] = field(default_factory=list)  # shards that are gone, or were damaged


def complete(
    store: GrowingStore,
    rows: Rows,
    urls: Sequence[str],
    settings: GenerationSettings,
    patience_s: float,
    console: Console,
    given: bool = False,
) -> Completed:
    """Wait for the documents of all rows, ask again for those that do not come, and record what there is.

    given: the rows were not asked for before.

    Raises:
        DataError: no server answers, or other shards of the store are missing or damaged.
    """
    found = Completed()
    longest = store.manifest.max_length
    store.look()
    there = 0
    for row in rows():
        found.wanted += is_stored(row, longest)
        found.short += not is_stored(row, longest)
        there += is_stored(row, longest) and row.id in store.lengths
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} documents"))
    with ProgressBars(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("storing", total=found.wanted, completed=there)

        def told(left: int) -> None:
            bar.update(task, completed=found.wanted - left)
            report_progress(found.wanted - left, found.wanted, "documents")

        missing = store.missing(rows()) if given else store.wait(rows, told, patience_s)
        if missing:
            found.given = len(missing)
            left = {row.id for row in missing}

            def came(names: list[str]) -> None:
                left.difference_update(names)
                told(len(left))

            found.refused = asyncio.run(collect_given(missing, urls, settings, store, console, came))
            missing = store.wait(rows, told, patience_s)
        found.missing = len(missing)
    found.documents, found.lost = store.complete()
    return found


def store_table(store: GrowingStore, found: Completed) -> Table:
    """The counts of the store."""
    table = Table(show_header=False, box=None)
    table.add_row("store", escape(store.url))
    table.add_row("documents", f"{found.wanted - found.missing:,} of {found.wanted:,} rows, {found.documents:,} in all")
    if found.given:
        table.add_row("sent as prompt and answer", f"{found.given:,}")
    if found.short:
        table.add_row("left out", f"{found.short:,} rows without a response in {store.manifest.max_length:,} tokens")
    for name in found.lost:
        table.add_row("lost", f"{name} was gone or damaged; those of its documents that are rows were collected again")
    return table


def missing_line(store: GrowingStore, found: Completed) -> str:
    """One sentence on documents that did not reach the store."""
    refused = next(iter(found.refused.values()), "")
    why = f"a server refused {len(found.refused):,} of them ({refused})" if refused else "the servers' logs say why"
    return (
        f"{found.missing:,} documents did not reach {store.url}: {why}; what is there is kept, run the same command "
        "again to ask for them again"
    )
