"""What a running job tells and asks while its stages run."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from eagle_plugin.common.progress import read_progress

PRINT_S = 10.0  # between two lines of progress


class Progress(NamedTuple):
    """How far a stage is; rate: units per second of this run of the stage; seconds_left: None if unknown."""

    done: float
    total: float | None
    unit: str
    rate: float | None
    seconds_left: float | None

    def __str__(self) -> str:
        if self.total == 1.0:  # a share
            text = f"{self.done:.1%} {self.unit}"
        else:
            text = f"{self.done:,.0f}{'' if self.total is None else f' of {self.total:,.0f}'} {self.unit}"
            text += "" if self.rate is None else f", {self.rate:,.1f} per second"
        return text + ("" if self.seconds_left is None else f", {timedelta(seconds=round(self.seconds_left))} left")


class Watch:
    """Prints the progress of stages, and stops on request; a job's own watch (`job_watch.py`) also writes it down.

    Attributes:
        progress_file: where a stage records its progress; None: nowhere.
        progress: of the stage that runs; None before its first record.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.progress_file: Path | None = None
        self.progress: Progress | None = None
        self._console, self._stop = console, False
        self._title, self._printed = "", time.monotonic()
        self._first: tuple[float, float] | None = None  # (time, done) of the stage's first record

    def request_stop(self) -> None:
        """Ask the job to end after its current step; may be called from a signal handler."""
        self._stop = True

    def stops(self) -> bool:
        """Whether the job was asked to end."""
        return self._stop

    def begin(self, stages: list[str], progress_file: Path) -> None:
        """The job has these stages, in order; it holds its folders now."""
        self.progress_file = progress_file

    def stage(self, number: int, name: str) -> None:
        """Stage `number`, from 1, begins."""
        self._title, self._first, self.progress = f"{number} {name}", None, None
        if self.progress_file is not None:
            self.progress_file.unlink(missing_ok=True)

    def finished(self, name: str) -> None:
        """The stage is done, now or before."""
        self.progress = None
        if self.progress_file is not None:
            self.progress_file.unlink(missing_ok=True)

    def tick(self) -> None:
        """Called several times per second while a stage runs."""
        now = time.monotonic()
        if self._console is not None and now - self._printed >= PRINT_S:
            self._printed = now
            if self.measure() is not None:
                self._console.print(f"{self._title}: {self.progress}", highlight=False)

    def measure(self) -> Progress | None:
        """Read how far the stage is; its rate is that since the first record of this run."""
        found = read_progress(self.progress_file) if self.progress_file is not None else {}
        done, total = found.get("done"), found.get("total")
        if not isinstance(done, int | float):
            return self.progress
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        seconds, gained = now - self._first[0], done - self._first[1]
        rate = gained / seconds if gained > 0 and seconds > 0 else None
        left = (total - done) / rate if rate and isinstance(total, int | float) else None
        self.progress = Progress(done, total, str(found.get("unit", "")), rate, left)
        return self.progress
