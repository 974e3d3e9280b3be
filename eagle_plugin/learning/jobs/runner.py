"""Runs the stages of a job: each in a process of its own, with a log, until the end or a request to stop."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from eagle_plugin.bench.choices import default_engine
from eagle_plugin.bench.memory import available_bytes, gib
from eagle_plugin.bench.servers import OutOfMemory, Server, ServerSpec
from eagle_plugin.common.atomic_io import remove_leftovers, write_output
from eagle_plugin.common.command_end import sigterm_as_exit
from eagle_plugin.common.devices import default_device, fast_dtype
from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.jobs.answers import keep_answers_to
from eagle_plugin.learning.jobs.lineage import LINEAGE, Lineage
from eagle_plugin.learning.jobs.locks import hold
from eagle_plugin.learning.jobs.recipe import JobError, JobRecipe
from eagle_plugin.learning.jobs.stage import Stage
from eagle_plugin.learning.jobs.stage_process import StageKilled, StopRequested, call
from eagle_plugin.learning.jobs.stage_record import begin_anew, is_done, note_settings
from eagle_plugin.learning.jobs.stages import data_stages, head_stages
from eagle_plugin.learning.jobs.training_processes import MODULE, processes_of
from eagle_plugin.learning.jobs.watch import Watch

JOB_FILE = "job.json"  # in each folder: which stages of it are done
PROGRESS_FILE = ".progress.json"
PROMPT_TOKENS = 1024  # for which the context of a server has room beside its longest answer
MEMORY_S = 300.0  # for other programs to free memory


def check_until(stages: Sequence[Stage], until: str | None) -> None:
    """Raise JobError unless `until` is None or begins the name of a stage."""
    if until is not None and not any(stage.name.startswith(until) for stage in stages):
        names = ", ".join(stage.name for stage in stages)
        raise JobError(f"--until {until} is no stage of this recipe, wanted the beginning of one of: {names}")


def run_job(
    job: JobRecipe,
    target: Path,
    out: Path,
    console: Console,
    *,
    data: Path | None = None,
    minutes: float | None = None,
    until: str | None = None,
    watch: Watch | None = None,
    named_by: tuple[str, str] = ("--data", "--out"),
) -> None:
    """Run the stages that are not done yet; a stage that was stopped resumes.

    Args:
        target: the target's folder. out, data: folders of the job, see `list_stages`.
        minutes: of training, instead of the recipe's budget.
        until: stop after the stage whose name starts with this.
        watch: hears of each stage and its progress, and asks to stop.
        named_by: how the user names the folders `data` and `out`, for errors.

    Raises:
        JobError: a stage failed (its own message was printed before), or a folder is in use by another job.
        ServerError: the engine did not start, or ended. Where memory ran out, a stage is tried twice.
        StopRequested: `watch`, or SIGTERM, asked to stop.
    """
    data, watch = out if data is None else data, watch or Watch()
    homes = [(data, stage) for stage in data_stages(job, target, data)]
    homes += [(out, stage) for stage in head_stages(job, target, out, data, minutes)]
    stages = [stage for _, stage in homes]
    check_until(stages, until)
    with hold(dict(zip(named_by, (data, out), strict=True))), _stop_on_sigterm(watch):
        for folder in {data, out}:
            remove_leftovers(folder)
        watch.begin([stage.name for stage in stages], out / PROGRESS_FILE)
        lineage = Lineage(out / LINEAGE, job, target, out, data)
        records = {folder: _read_done(folder / JOB_FILE) for folder in (data, out)}
        digest = ""
        for number, (home, stage) in enumerate(homes, 1):
            done = records[home]
            title = f"{number}/{len(stages)} {stage.name}"
            digest = hashlib.sha256(json.dumps([digest, stage.args, stage.recipe]).encode()).hexdigest()
            began = time.monotonic()
            if is_done(stage, done, digest):
                console.print(f"{title}: done before", highlight=False)
                watch.stage(number, stage.name)
                if stage.settings is not None and note_settings(stage, done, digest):
                    _write_done(home, done)  # an earlier version noted fewer of them
            else:
                if watch.stops():
                    raise StopRequested
                console.print(f"[bold]{title}[/]", highlight=False)
                watch.stage(number, stage.name)
                if stage.recipe:
                    write_output(Path(stage.args[1]), [stage.recipe], mode=0o600)  # a URL may hold a password
                if stage.partial:
                    if told := begin_anew(stage, done, digest):
                        console.print(told, style="yellow", markup=False, highlight=False)
                    _write_done(home, done)
                if stage.prompts is not None:
                    removed = keep_answers_to(stage.prompts, stage.output)
                    if removed:
                        console.print(f"{removed:,} answers to prompts that are no longer wanted were removed")
                log = out / "logs" / f"{number:02d}-{stage.name.replace(' ', '-')}.log"
                attempt = partial(_attempt, stage, job, target, home, console, log, watch)
                try:
                    try:
                        attempt()
                    except (OutOfMemory, StageKilled) as error:
                        console.print(str(error), style="yellow", markup=False, highlight=False)
                        _wait_for_memory(error, watch, console)
                        attempt()
                except BaseException:
                    with contextlib.suppress(UserError):  # of a full disk; the first error says more
                        lineage.add_interrupted(stage, digest, time.monotonic() - began)
                    raise
                done[stage.name] = digest
                _write_done(home, done)
            lineage.add(stage, digest, time.monotonic() - began)
            watch.finished(stage.name)
            if until is not None and stage.name.startswith(until):
                return
        if job.train:
            _link_head(out, list(job.train)[-1])


def _attempt(stage: Stage, job: JobRecipe, target: Path, home: Path, console: Console, log: Path, watch: Watch) -> None:
    """Run a stage; what it had made before is continued."""
    processes = processes_of(stage, job)
    if processes > 1:
        console.print(f"in {processes} processes", highlight=False)
        call([str(processes), *stage.args[1:]], stage.name, log, watch, MODULE)
        return
    with _endpoint(stage, job, target, home, console) as extra:
        call([*stage.args, *extra], stage.name, log, watch, stage.module)


def _wait_for_memory(error: OutOfMemory | StageKilled, watch: Watch, console: Console) -> None:
    """Return when a stage that lacked memory may have enough of it; raise its error if that takes too long."""
    console.print(
        f"waiting up to {MEMORY_S / 60:g} minutes until {gib(error.wanted)} are free, then the stage runs once more",
        highlight=False,
    )
    end = time.monotonic() + MEMORY_S
    while available_bytes() < error.wanted:
        if watch.stops():
            raise StopRequested
        if time.monotonic() > end:
            raise error
        watch.tick()
        time.sleep(1.0)


@contextlib.contextmanager
def _stop_on_sigterm(watch: Watch) -> Iterator[None]:
    """Within this block SIGTERM asks the job to stop after its current step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        watch.request_stop()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _endpoint(stage: Stage, job: JobRecipe, target: Path, out: Path, console: Console) -> Iterator[list[str]]:
    """The arguments that name an endpoint: none, or those of a stock engine that runs as long as the stage does."""
    if not stage.needs_server:
        yield []
        return
    device = default_device()
    spec = ServerSpec(target, "plain", engine=default_engine(), device=device, dtype=fast_dtype(device))
    spec = replace(spec, context_length=max(spec.context_length, job.generate.max_tokens + PROMPT_TOKENS))
    spec = spec.for_concurrency(job.generate.concurrency).alone()
    # The start of an engine cannot be asked to finish a step: here SIGTERM ends the job at once.
    with contextlib.ExitStack() as stack:
        with sigterm_as_exit():
            server = stack.enter_context(Server.of(spec, out / "logs"))
            console.print("starting the engine", highlight=False)
            server.wait_ready()
        try:
            yield ["--endpoint", server.url]
        except JobError:
            server.check_alive("while it answered prompts")  # the stage knows only that no endpoint answers
            raise


def _read_done(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise JobError(f"{path} is not the record of a job ({error}); delete it to run every stage again") from error


def _write_done(home: Path, done: dict[str, str]) -> None:
    write_output(home / JOB_FILE, [json.dumps(done, indent=2), "\n"])


def _link_head(out: Path, last: str) -> None:
    link = out / "head"
    part = out / "head.part"
    part.unlink(missing_ok=True)
    part.symlink_to(Path("train") / last / "head")
    os.replace(part, link)
