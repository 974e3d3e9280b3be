"""A job as an object: created, run here or in a process of its own, waited for, described, stopped and resumed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle_plugin.bench.choices import resolve_target
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.common.devices import default_device
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.recipes import parse_yaml, read_yaml, validate
from eagle_plugin.learning.jobs.job_file import JobFile, check_job, dump_job, workflow_values
from eagle_plugin.learning.jobs.job_watch import JobWatch
from eagle_plugin.learning.jobs.jobs_folder import LINEAGE, RAY, YAML, JobsFolder, Status
from eagle_plugin.learning.jobs.lineage import LINEAGE as LINEAGE_FILE
from eagle_plugin.learning.jobs.ray_jobs import ENDED, RayRun, submit
from eagle_plugin.learning.jobs.recipe import JobError
from eagle_plugin.learning.jobs.runner import run_job
from eagle_plugin.learning.jobs.stage_process import COMMAND, StopRequested
from eagle_plugin.models.shipped import recipe_file

JOBS = "out/jobs"
LOG = "job.log"  # in the job's folder: what `start` prints
POLL_S = 0.5


class Job:
    """A job of `eagle-plugin optimize`, which need not run in this process, nor on this machine.

    Every method raises UserError (`JobError`, `DataError`) for what the command refuses, with its sentence.
    """

    def __init__(self, name: str, jobs: str = JOBS) -> None:
        """A job that exists; jobs: folder or URL of the jobs."""
        self.name, self._jobs = name, JobsFolder(jobs)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_before = 0.0  # status.started when the process was started
        self._jobs.yaml(name)  # refuses an unknown name

    @classmethod
    def create(
        cls,
        name: str,
        *,
        jobs: str = JOBS,
        workflow: str | None = None,
        recipe: str | Path | None = None,
        target: str | None = None,
        head: str | None = None,
        prompts: Sequence[str] = (),
        dataset: Sequence[str] = (),
        settings: Mapping[str, Any] | Sequence[str] = (),
    ) -> Job:
        """Check and write a new job; `run` or `start` runs it. The arguments are the options of `optimize create`.

        settings: keys of the job, as in {"train.head.budget.epochs": 3}, or ["train.head.budget.epochs=3"].
        """
        folder = JobsFolder(jobs)
        if bool(recipe) == bool(workflow):
            raise JobError("a new job needs either --workflow or --recipe; see `eagle-plugin optimize create --help`")
        if recipe:
            given = {"target": target, "head": head, "prompts": prompts, "dataset": dataset}
            if extra := [f"--{option}" for option, value in given.items() if value]:
                raise JobError(
                    f"{', '.join(extra)} belongs to --workflow; with --recipe write --set target=... instead"
                )
            where, values = str(recipe), read_yaml(recipe_file(Path(recipe)), JobError)
        else:
            assert workflow is not None
            where = f"--workflow {workflow}"
            values = workflow_values(workflow, target, head, prompts, dataset, default_device() == "cuda")
        job = check_job(values, _overrides(settings), where)
        _folders(folder, name, job)
        folder.create(name, dump_job(values))
        return cls(name, jobs)

    @classmethod
    def list(cls, jobs: str = JOBS) -> dict[str, Status]:
        """All jobs of a folder with how they are doing."""
        folder = JobsFolder(jobs)
        return {name: folder.status(name) for name in folder.names()}

    def change(self, settings: Mapping[str, Any] | Sequence[str]) -> None:
        """Change keys of a job that does not run; what depends on them is made again when it is resumed."""
        self._refuse_running()
        values = parse_yaml(self._jobs.yaml(self.name), self._where, JobError)
        _folders(self._jobs, self.name, check_job(values, _overrides(settings), self._where))
        self._jobs.folder.replace(self.name + YAML, dump_job(values).encode())

    def run(self, console: Console | None = None) -> Status:
        """Run the job in this process until it is finished or stopped; what is done already stays."""
        self._refuse_running()
        console = console or Console(stderr=True)
        job = check_job(parse_yaml(self._jobs.yaml(self.name), self._where, JobError), [], self._where)
        out, data = _folders(self._jobs, self.name, job)
        with JobWatch(self._jobs, self.name, job.limit_minutes, console) as watch:
            try:
                target = resolve_target(job.target, console)
                named_by = "--set data=DIR", "--set out=DIR"
                run_job(job, target, out, console, data=data, minutes=job.train_minutes, watch=watch, named_by=named_by)
            except StopRequested:
                watch.end("stopped", watch.reason)
                return self.describe()
            except (KeyboardInterrupt, SystemExit):
                watch.end("stopped", "by a signal")
                raise
            except (UserError, ServerError, OSError) as error:
                try:
                    watch.end("failed", str(error))
                except UserError:  # of the same disk; the first error says more
                    console.print("the status could not be written either", highlight=False)
                if isinstance(error, ServerError):
                    raise JobError(str(error)) from error
                raise
            watch.end("finished")
        self._jobs.folder.replace(self.name + LINEAGE, (out / LINEAGE_FILE).read_bytes())
        return self.describe()

    def start(self) -> None:
        """Run the job in a process of its own, which outlives this one; what it prints is in job.log of its folder."""
        self._refuse_running()
        self._started_before = self.describe().started
        log = self.folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*COMMAND, "optimize", "resume", self.name, "--jobs", self._jobs.address]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def submit(self, address: str, cpus: float = 1, gpus: float = 0) -> None:
        """Let a Ray cluster run the job, on one machine with so many cores and GPUs free.

        address: of its dashboard, as http://HOST:8265. Every machine of the cluster must see the folder of the jobs,
        what the job reads, and its own folder, by the same names.
        """
        self._refuse_running()
        found = None
        with suppress(JobError):  # a cluster that is gone runs nothing; a run of it that goes on shows in the status
            found = self.on_cluster()
        if found is not None and found[1] not in ENDED:
            raise JobError(f"the job {self.name} is {found[1]} on the cluster {found[0]}; stop it or wait for it")
        run = submit(address, self.name, self._jobs.address, cpus, gpus)
        self._jobs.folder.replace(self.name + RAY, run.to_bytes())

    def on_cluster(self) -> tuple[str, str, str] | None:
        """(address, Ray's state, what it says) of a job that a cluster was given last; None if none was."""
        run = self._ray_run()
        return None if run is None else (run.address, *run.state())

    def wait(self, timeout: float | None = None) -> Status:
        """Wait until the job does not run any more.

        timeout: seconds.

        Raises:
            JobError: it failed, was interrupted, or does not run. TimeoutError: it runs still.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            ended = self._process is None or self._process.poll() is not None
            status, cluster = self.describe(), None
            if ended and not status.alive:
                cluster = self.on_cluster()
                if cluster is None or cluster[1] in ENDED:
                    break
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the job {self.name} is {status.shown} after {timeout:g} seconds")
            time.sleep(POLL_S)
        if self._process is not None and status.started == self._started_before:
            raise JobError(_last_error(self.folder / LOG))  # refused before it began
        if cluster is not None and cluster[1] != "SUCCEEDED" and status.shown in ("interrupted", "created"):
            raise JobError(f"the job {self.name} ended on the cluster {cluster[0]}: {cluster[2] or cluster[1]}")
        if status.shown in ("failed", "interrupted", "created"):
            raise JobError(status.message or f"the job {self.name} is {status.shown}; `resume` runs it")
        return status

    def describe(self) -> Status:
        """How the job is doing."""
        return self._jobs.status(self.name)

    def stop(self) -> None:
        """Ask the job to end after its current step, wherever it runs."""
        status = self.describe()
        if status.alive:
            self._jobs.request_stop(self.name)
            return
        run = self._ray_run()
        if run is None or run.state()[0] in ENDED:
            raise JobError(f"the job {self.name} is not running, it is {status.shown}; there is nothing to stop")
        run.stop()  # it waits for a machine

    @property
    def settings(self) -> JobFile:
        """Every key of the job; the files that it names may be on another machine."""
        return validate(JobFile, parse_yaml(self._jobs.yaml(self.name), self._where, JobError), self._where, JobError)

    @property
    def folder(self) -> Path:
        """What the job makes is here, on the machine that runs it."""
        return _folders(self._jobs, self.name, self.settings)[0]

    @property
    def head(self) -> Path:
        """The trained head, once the job is finished."""
        return self.folder / "head"

    def lineage(self) -> dict[str, Any]:
        """What the head of a finished job was made of: digests, versions, times."""
        found: dict[str, Any] = json.loads(bytes(self._jobs.folder.read(self.name + LINEAGE)))
        return found

    def _ray_run(self) -> RayRun | None:
        try:
            return RayRun.of(bytes(self._jobs.folder.read(self.name + RAY)))
        except FileNotFoundError:
            return None

    @property
    def _where(self) -> str:
        return f"{self._jobs.folder.url}/{self.name}{YAML}"

    def _refuse_running(self) -> None:
        status = self.describe()
        if status.alive:
            raise JobError(
                f"the job {self.name} is running on {status.host} (process {status.pid}); stop it or wait for it"
            )


def _overrides(settings: Mapping[str, Any] | Sequence[str]) -> Sequence[str]:
    """As `--set` takes them: JSON is YAML."""
    if isinstance(settings, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    return settings


def _folders(jobs: JobsFolder, name: str, job: JobFile) -> tuple[Path, Path]:
    """(out, data) of a job."""
    out = job.out or jobs.work_folder(name)
    if out is None:
        raise JobError(f"jobs in {jobs.folder.url} need a folder on this machine for their files; add --set out=DIR")
    return out, job.data or out


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return found[-1] if found else f"the job ended before it began; {log} says why"
