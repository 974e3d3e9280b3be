"""Writes the status of a running job every few seconds, and reads whether it shall stop."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.learning.jobs.jobs_folder import JobsFolder, StageTime, State, Status
from eagle_plugin.learning.jobs.watch import Watch

BEAT_S, REMOTE_BEAT_S = 2.0, 15.0


class JobWatch(Watch):
    """A context manager; the status is written from `begin` on, so that a job that is refused changes nothing.

    limit_minutes: of all runs of the job together; then it stops as if it had been asked to.
    """

    def __init__(self, jobs: JobsFolder, name: str, limit_minutes: float | None, console: Console) -> None:
        super().__init__(console)
        self._jobs, self._name, self._limit = jobs, name, limit_minutes
        self._before = jobs.status(name).spent_s
        self._status = Status()
        self._began = 0.0
        self._mutex, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.reason = "on request"

    def begin(self, stages: list[str], progress_file: Path) -> None:
        super().begin(stages, progress_file)
        self._began = time.monotonic()
        self._jobs.forget_stop(self._name)
        self._status = Status(
            state="running", stages=stages, host=socket.gethostname(), pid=os.getpid(), started=time.time()
        )
        self._write()  # the first one must succeed: else nobody could follow the job
        self._thread.start()

    def stage(self, number: int, name: str) -> None:
        super().stage(number, name)
        self._status.number, self._status.stage = number, name
        self._stage_began = time.monotonic()
        self._try_to_write()

    def finished(self, name: str) -> None:
        super().finished(name)
        seconds = round(time.monotonic() - self._stage_began, 1)
        self._status.times.append(StageTime(name=name, seconds=seconds))

    def stops(self) -> bool:
        if not self._stop and self._limit is not None and self._began and self._spent() > 60 * self._limit:
            self.reason = f"its time limit of {self._limit:g} minutes is over; resume it with --set limit_minutes=M"
            self._stop = True
        return super().stops()

    def end(self, state: State, message: str = "") -> None:
        """Write the last status, if the job began at all.

        Raises:
            DataError: it cannot be written.
        """
        if not self._began:
            return
        self._over.set()
        self._thread.join()
        self._status.state, self._status.message = state, without_credentials(message)
        self.progress = None
        self._write()

    def __enter__(self) -> JobWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()

    def _spent(self) -> float:
        return self._before + time.monotonic() - self._began

    def _beat(self) -> None:
        while not self._over.wait(REMOTE_BEAT_S if self._jobs.remote else BEAT_S):
            with contextlib.suppress(UserError, OSError):
                if self._jobs.stop_requested(self._name):
                    self.request_stop()
            self._try_to_write()

    def _try_to_write(self) -> None:
        # A full disk or a lost network must not end a stage that may go on; the next beat tries again.
        with contextlib.suppress(UserError, OSError):
            self._write()

    def _write(self) -> None:
        with self._mutex:
            status = self._status
            if status.state == "running" and self.stops():
                status.state = "stopping"
            now = self.measure() if status.state in ("running", "stopping") else None
            if now is None:
                status.done = status.total = status.rate = status.seconds_left = None
            else:
                status.done, status.total, status.unit, status.rate, status.seconds_left = now
            status.heartbeat, status.spent_s = time.time(), round(self._spent(), 1)
            self._jobs.write_status(self._name, status)
