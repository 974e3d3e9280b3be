"""Rich's progress bars on a terminal, and lines with percentages in a log."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

from eagle_plugin.common.percent_lines import PercentLines


class ProgressBars(Progress):
    """As `rich.progress.Progress`; where the console is no terminal, a line at the start and at every further 10 %."""

    def __init__(self, *columns: str | ProgressColumn, console: Console, shown: bool = True) -> None:
        """shown: False draws and prints nothing, as in all processes but the first."""
        self.shown = shown
        self._draws = console.is_terminal
        self._lines: dict[TaskID, PercentLines] = {}  # tasks may have the same description
        super().__init__(*columns, console=console, disable=not (shown and self._draws))

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As in rich."""
        super().update(task_id, **changes)
        self._log(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As in rich."""
        super().advance(task_id, advance)
        self._log(task_id)

    def _log(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if not self.shown or self._draws or not task.total or not task.visible:
            return
        details = [f"{value:,} {name}" if type(value) is int else str(value) for name, value in task.fields.items()]
        if task.time_remaining:
            details.append(f"{timedelta(seconds=task.time_remaining)} left")
        lines = self._lines.setdefault(task_id, PercentLines(self.console))
        lines(task.description, task.completed / task.total, ", ".join(filter(None, details)))
