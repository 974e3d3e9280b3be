"""Prints what the tables of all benchmarks share: a plain box that fits 80 characters, and numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from eagle_plugin.bench.quartiles import Quartiles


def plain_table(title: str, caption: str, columns: Sequence[str], left: Collection[str] = ()) -> Table:
    """An empty table; the columns of `left` are names, the others are numbers."""
    # The box separates the columns by a space.
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def number(value: float | None, digits: int = 2) -> str:
    """The number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_quartiles(value: Quartiles | None, digits: int = 2, unit: str = "", between: str = " ") -> str:
    """The median and, in brackets, the quartiles, as rich markup."""
    if value is None:
        return "-"
    return escape(f"{value.median:.{digits}f}{unit}{between}[{value.q1:.{digits}f}-{value.q3:.{digits}f}]")
