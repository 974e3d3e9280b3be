"""The folder of jobs: per job its YAML, its status and a request to stop, on a local path or any URL of a store.

Each of them is a small file that is written whole: NAME.yaml, NAME.status.json, NAME.stop and NAME.lineage.json. What a
job makes is in a folder of its own, on the machine that runs it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle_plugin.common.recipes import did_you_mean
from eagle_plugin.learning.data.store.objects import LocalFolder, open_folder
from eagle_plugin.learning.jobs.recipe import JobError

YAML, STATUS, STOP, LINEAGE = ".yaml", ".status.json", ".stop", ".lineage.json"
RAY = ".ray.json"  # the cluster that runs a job
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
STALE_S = 60.0  # a running job whose last sign of life is older was interrupted
State = Literal["created", "running", "stopping", "stopped", "failed", "finished"]


class StageTime(BaseModel):
    """A stage that is done, and the seconds that it took in this run of the job."""

    name: str
    seconds: float


class Status(BaseModel):
    """How a job is doing. Times are seconds since 1970 (UTC).

    stage, number, stages: the stage that runs or ran last, its number from 1, and the names of all.
    spent_s: what all runs of the job took together.
    """

    model_config = ConfigDict(extra="ignore")  # of a newer version

    state: State = "created"
    stage: str = ""
    number: int = 0
    stages: list[str] = []
    done: float | None = None
    total: float | None = None
    unit: str = ""
    rate: float | None = None
    seconds_left: float | None = None
    message: str = ""
    host: str = ""
    pid: int = 0
    started: float = 0.0
    heartbeat: float = 0.0
    spent_s: float = 0.0
    times: list[StageTime] = []

    @property
    def alive(self) -> bool:
        """Whether a process still works on the job: by its heartbeat, on its own machine also by its process."""
        if self.state not in ("running", "stopping"):
            return False
        if self.host == socket.gethostname() and not _process_runs(self.pid):
            return False
        return time.time() - self.heartbeat < STALE_S

    @property
    def shown(self) -> str:
        """The state to show: that of a job whose process has died is "interrupted"."""
        return "interrupted" if self.state in ("running", "stopping") and not self.alive else self.state


class JobsFolder:
    """The jobs below one path or URL (file://, s3://, gs://, az:// and what fsspec knows).

    Raises:
        DataError: the URL cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._url, self.folder = url, open_folder(url)
        self.remote = not isinstance(self.folder, LocalFolder)

    def names(self) -> list[str]:
        """The jobs, sorted."""
        return sorted(name.removesuffix(YAML) for name in self.folder.names() if name.endswith(YAML))

    @property
    def address(self) -> str:
        """What names the folder to other processes: its URL with its user, or an absolute path."""
        return str(self.folder.path.resolve()) if isinstance(self.folder, LocalFolder) else self._url

    def work_folder(self, name: str) -> Path | None:
        """Where a job keeps what it makes if its YAML does not say it; None: the YAML must say it."""
        return self.folder.path.resolve() / name if isinstance(self.folder, LocalFolder) else None

    def create(self, name: str, text: str) -> None:
        """Write the YAML of a new job.

        Raises:
            JobError: it has no good name. ObjectExists: there is such a job.
        """
        if not NAME.fullmatch(name):
            raise JobError(f"{name!r} is no name of a job, wanted letters, digits, - and _; name it otherwise")
        if name in self.names():
            raise JobError(
                f"there is a job {name} in {self.folder.url} already; continue it with `resume`, or use another name"
            )
        self.folder.create(name + YAML, text.encode())

    def yaml(self, name: str) -> bytes:
        """The YAML of a job.

        Raises:
            JobError: there is no such job.
        """
        try:
            return bytes(self.folder.read(name + YAML))
        except FileNotFoundError as error:
            known = self.names()
            hint = did_you_mean(name, known)
            found = f"wanted one of {', '.join(known)}{hint}" if known else "which holds no job"
            raise JobError(f"there is no job {name!r} in {self.folder.url}, {found}; see `optimize list`") from error

    def status(self, name: str) -> Status:
        """The newest status; that of a new job if there is none.

        Raises:
            JobError: the file is damaged.
        """
        try:
            return Status.model_validate(json.loads(bytes(self.folder.read(name + STATUS))))
        except FileNotFoundError:
            return Status()
        except (ValueError, ValidationError) as error:
            raise JobError(
                f"{self.folder.url}/{name}{STATUS} is not the status of a job; remove it, then resume the job"
            ) from error

    def write_status(self, name: str, status: Status) -> None:
        """Replace the status."""
        self.folder.replace(name + STATUS, (status.model_dump_json(indent=1) + "\n").encode())

    def request_stop(self, name: str) -> None:
        """Ask the process that runs the job, wherever it is, to stop."""
        self.folder.replace(name + STOP, b"")

    def stop_requested(self, name: str) -> bool:
        try:
            self.folder.read(name + STOP)
        except FileNotFoundError:
            return False
        return True

    def forget_stop(self, name: str) -> None:
        if self.stop_requested(name):
            self.folder.remove(name + STOP)


def _process_runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
