"""What `eagle-plugin data prepare` counts, and the table that it prints at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle_plugin.learning.data.privacy.filter import PRIVATE, PrivacySettings
from eagle_plugin.learning.data.sources.record_files import CUT


@dataclass
class PreparationStats:
    """Counts of what was read, kept and left out."""

    read: int = 0
    kept: Counter[str] = field(default_factory=Counter)  # by split
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    changed: Counter[str] = field(default_factory=Counter)  # what was changed in prompts that were read
    first: dict[str, str] = field(default_factory=dict)  # the first place per reason and change
    found: Counter[str] = field(default_factory=Counter)  # findings of private data, by type
    private: int = 0  # prompts with private data
    note: str | None = None  # on answers that do not say enough about their target

    def skip(self, where: str, reason: str) -> None:
        """Count something left out."""
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)

    def change(self, where: str, what: str) -> None:
        """Count something changed in a prompt."""
        self.changed[what] += 1
        self.first.setdefault(what, where)


def print_stats(stats: PreparationStats, settings: PrivacySettings, out: Path, console: Console) -> None:
    """Print the warnings and the table of one command."""
    if CUT in stats.first:
        console.print(f"warning: {stats.first[CUT]}: {CUT}; it was read up to there", style="yellow", markup=False)
    if stats.note:
        console.print(f"warning: {stats.note}", style="yellow", markup=False, soft_wrap=True)
    table = Table("", "prompts", "first at", title=escape(f"{out}"))
    table.add_row("read", f"{stats.read:,}", "")
    for split, count in sorted(stats.kept.items()):
        table.add_row(f"kept for {split}", f"{count:,}", "")
    for reason, count in stats.skipped.most_common():
        table.add_row(f"left out: {reason}", f"{count:,}", escape(Path(stats.first[reason]).name))
    for what, count in stats.changed.most_common():
        table.add_row(f"changed: {what}", f"{count:,}", escape(Path(stats.first[what]).name))
    if settings.mode != "off" and PRIVATE not in stats.skipped:
        table.add_row(f"with private data ({settings.mode})", f"{stats.private:,}", "")
    for type, count in stats.found.most_common():
        table.add_row(f"  {escape(type)} found", f"{count:,}", "")
    console.print(table)
