"""A table in a document that a benchmark writes: what is between two marks."""

from __future__ import annotations

from pathlib import Path

from eagle_plugin.common.atomic_io import write_output

END = "<!-- end -->"


def replace_table(path: Path, begin: str, table: str) -> None:
    """Put `table` between the line `begin` and the next `END`. ValueError where they are not there."""
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{path} has no place for the table: it needs the lines {begin.strip()} and {END}")
    write_output(path, [f"{before}{begin}\n{table}\n{end}{after}"])
