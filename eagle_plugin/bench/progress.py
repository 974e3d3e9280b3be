"""What a long command is doing: a live bar on a terminal, timed log lines in a file or a pipe."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SILENT_SECONDS = 15.0  # without a terminal: the longest time between two lines of a step


class Step(Protocol):
    """One step of a command, while it runs."""

    def update(self, detail: str = "", share: float | None = None) -> None:
        """Tell what is happening now, and the share of the step that is done (0 to 1; None: unknown)."""


class Steps:
    """The steps of one command, one after the other; times count from the creation of this object."""

    def __init__(self, console: Console, silent_seconds: float = SILENT_SECONDS) -> None:
        self.console = console
        self._silent_seconds = silent_seconds
        self._began = time.monotonic()
        self._printed = self._began
        self._lock = threading.RLock()

    def log(self, text: str) -> None:
        """Print one line with the elapsed time; `text` is rich markup."""
        with self._lock:
            self._printed = time.monotonic()
            self.console.print(rf"[dim]\[{self._printed - self._began:4.0f} s][/] {text}", soft_wrap=True)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Step]:
        """Show `what` until the block ends."""
        with self._bar(what) if self.console.is_terminal else self._lines(what) as step:
            yield step

    @contextlib.contextmanager
    def _bar(self, what: str) -> Iterator[Step]:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=4) as progress:
            task = progress.add_task(what, total=None)

            class Bar:
                def update(self, detail: str = "", share: float | None = None) -> None:
                    text = f"{what}: {detail}" if detail else what
                    progress.update(task, description=text, total=None if share is None else 1.0, completed=share or 0)

            yield Bar()

    @contextlib.contextmanager
    def _lines(self, what: str) -> Iterator[Step]:
        lines = _Lines(self, what)
        lines.write()
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(0.2):
                with self._lock:
                    if time.monotonic() - self._printed > self._silent_seconds and not ended.is_set():
                        lines.write()

        thread = threading.Thread(target=repeat, name="progress", daemon=True)
        thread.start()
        try:
            yield lines
        finally:
            ended.set()
            thread.join()


class _Lines:
    """A step in a log: a line at its start, at every further 10 %, and when nothing was printed for a while."""

    def __init__(self, steps: Steps, what: str) -> None:
        self._steps, self._what = steps, what
        self._detail, self._share, self._tenth = "", 0.0, 0
        self._known = False

    def update(self, detail: str = "", share: float | None = None) -> None:
        self._detail = detail
        if share is not None:
            self._share, self._known = share, True
            if int(share * 10 + 1e-9) > self._tenth:
                self._tenth = int(share * 10 + 1e-9)
                self.write()

    def write(self) -> None:
        parts = [f"{self._share:.0%}"] if self._known else []
        parts += [self._detail] if self._detail else []
        text = f"{self._what}: {', '.join(parts)}" if parts else self._what
        self._steps.log(text.replace("[", r"\["))
