"""Shows how far a command is: a bar on a terminal, lines in a log, and a small file that a job reads.

The path of that file is in EAGLE_PROGRESS_FILE. Without the variable nothing is written: a sub-command that a user
starts has its own progress bar.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from eagle_plugin.common.atomic_io import replace_file
from eagle_plugin.common.json_files import kept_object

VARIABLE = "EAGLE_PROGRESS_FILE"
EVERY_S = 0.5
_last = -EVERY_S


class PercentLines:
    """Prints on a rich console; every step is known by its name."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._tenths: dict[str, int] = {}

    def __call__(self, what: str, share: float, details: str = "") -> None:
        """Tell that this share (0 to 1) of a step is done; details: what else the line says."""
        tenth = int(share * 10 + 1e-9)  # three of ten are 0.3, which is a little less
        if tenth > self._tenths.get(what, -1):
            self._tenths[what] = tenth
            text = f"{what}: {share:.0%}" + (f", {details}" if details else "")
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


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


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function of what is being done and the share that is done; the bar appears with its first call."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PercentLines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=1.0)

    def report(what: str, share: float) -> None:
        bar.start()
        bar.update(task, description=what, completed=share)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def report_progress(done: float, total: float | None, unit: str) -> None:
    """Record that `done` of `total` units are finished (None: unknown); at most twice per second, errors are ignored.

    A job must not fail because its progress cannot be written.
    """
    global _last
    path = os.environ.get(VARIABLE)
    if not path or time.monotonic() - _last < EVERY_S:
        return
    _last = time.monotonic()
    # No flush: a progress that a power cut loses is not missed.
    with contextlib.suppress(OSError), replace_file(Path(path), flush=False) as temporary:
        temporary.write_text(json.dumps({"done": done, "total": total, "unit": unit}), encoding="utf-8")


def read_progress(path: Path) -> dict[str, Any]:
    """What `report_progress` wrote last; empty if there is nothing yet."""
    return kept_object(path)
