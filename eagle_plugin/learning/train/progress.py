"""The progress bar of a run, on stderr."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle_plugin.common.progress import ProgressBars, report_progress


class Bar:
    """One bar over the share of the budget, with loss, acceptance by depth and tokens per second. A context manager."""

    def __init__(self, console: Console, shown: bool) -> None:
        self._progress = ProgressBars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            shown=shown,
        )
        self._shown = shown
        self._task = self._progress.add_task("", total=1.0, numbers="")

    def show(self, what: str) -> None:
        """Set the description of the bar."""
        self._progress.update(self._task, description=what)

    def advance(self, share: float) -> None:
        """Move the bar to a share of the budget."""
        self._progress.update(self._task, completed=min(share, 1.0))
        if self._shown:
            report_progress(min(share, 1.0), 1.0, "of the budget")

    def report(self, loss: float, acceptance: Sequence[float], tokens_per_s: float) -> None:
        """Show the newest numbers of the training."""
        numbers = f"loss {loss:.3f}  accept {_depths(acceptance)}  {tokens_per_s:,.0f} tok/s"
        self._progress.update(self._task, numbers=numbers)

    def report_held_out(self, update: int, loss: float, acceptance: Sequence[float]) -> None:
        """Print the held-out numbers after an update."""
        self.print(f"update {update:,}: held-out loss {loss:.3f}, acceptance by depth {_depths(acceptance)}")

    def print(self, text: str) -> None:
        """Print a line that stays above the bar."""
        if self._shown:
            self._progress.console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()


def _depths(values: Sequence[float]) -> str:
    return "/".join("-" if math.isnan(value) else f"{value:.2f}".removeprefix("0") for value in values)
