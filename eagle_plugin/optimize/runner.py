"""Runs the stages of a job: each in a process of its own, with a log, until the end or a request to stop."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from rich.console import Console

from eagle_plugin.atomic_io import write_output
from eagle_plugin.bench.choices import default_engine
from eagle_plugin.bench.servers import Server, ServerSpec, sigterm_as_exit
from eagle_plugin.devices import default_device, fast_dtype
from eagle_plugin.optimize.answers import keep_answers_to
from eagle_plugin.optimize.lineage import LINEAGE, Lineage
from eagle_plugin.optimize.locks import hold
from eagle_plugin.optimize.recipe import JobError, JobRecipe
from eagle_plugin.optimize.stage import Stage
from eagle_plugin.optimize.stages import data_stages, head_stages
from eagle_plugin.optimize.watch import Watch
from eagle_plugin.progress_file import VARIABLE

COMMAND = (sys.executable, "-m", "eagle_plugin.cli")
JOB_FILE = "job.json"  # in each folder: which stages of it are done
PROGRESS_FILE = ".progress.json"
INTERRUPTED = 130
PATIENCE_S = 600.0  # for the step that a stopped stage finishes, such as one update of the training
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec


class StopRequested(Exception):
    """The job was asked to stop; what its stages have made is kept."""


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
) -> None:
    """Run the stages that are not done yet; a stage that was stopped resumes.

    Args:
        target: the target's folder. out, data: folders of the job, see `list_stages`.
        minutes: of training, instead of the recipe's budget.
        until: stop after the stage whose name starts with this.
        watch: hears of each stage and its progress, and asks to stop.

    Raises:
        JobError: a stage failed (its own message was printed before), or a folder is in use by another job.
        StopRequested: `watch`, or SIGTERM, asked to stop.
    """
    data, watch = out if data is None else data, watch or Watch()
    homes = [(data, stage) for stage in data_stages(job, target, data)]
    homes += [(out, stage) for stage in head_stages(job, target, out, data, minutes)]
    stages = [stage for _, stage in homes]
    check_until(stages, until)
    with hold({"--data": data, "--out": out}), _stop_on_sigterm(watch):
        watch.begin([stage.name for stage in stages], out / PROGRESS_FILE)
        lineage = Lineage(out / LINEAGE, job, target, out, data)
        records = {folder: _read_done(folder / JOB_FILE) for folder in (data, out)}
        digest = ""
        for number, (home, stage) in enumerate(homes, 1):
            done = records[home]
            title = f"{number}/{len(stages)} {stage.name}"
            digest = hashlib.sha256(json.dumps([digest, stage.args, stage.recipe]).encode()).hexdigest()
            began = time.monotonic()
            if done.get(stage.name) == digest and stage.output.exists():
                console.print(f"{title}: done before", highlight=False)
                watch.stage(number, stage.name)
            else:
                if watch.stops():
                    raise StopRequested
                console.print(f"[bold]{title}[/]", highlight=False)
                watch.stage(number, stage.name)
                if stage.recipe:
                    write_output(Path(stage.args[1]), [stage.recipe])
                if stage.partial:
                    _begin_anew(stage, done, digest)
                    write_output(home / JOB_FILE, [json.dumps(done, indent=2), "\n"])
                if stage.prompts is not None:
                    removed = keep_answers_to(stage.prompts, stage.output)
                    if removed:
                        console.print(f"{removed:,} answers to prompts that are no longer wanted were removed")
                with _endpoint(stage, job, target, home, console) as extra:
                    log = out / "logs" / f"{number:02d}-{stage.name.replace(' ', '-')}.log"
                    call([*stage.args, *extra], stage.name, log, watch)
                done[stage.name] = digest
                write_output(home / JOB_FILE, [json.dumps(done, indent=2), "\n"])
            lineage.add(stage, digest, time.monotonic() - began)
            watch.finished(stage.name)
            if until is not None and stage.name.startswith(until):
                return
        if job.train:
            _link_head(out, list(job.train)[-1])


def _begin_anew(stage: Stage, done: dict[str, str], digest: str) -> None:
    """Remove what the stage would continue, if it began with other settings."""
    key, settings = f"begun: {stage.name}", digest if stage.settings is None else stage.settings
    # Jobs of earlier versions did not note the settings of a stage.
    if done.get(key, settings if stage.settings is not None else "") != settings:
        for path in stage.partial:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    done[key] = settings


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
    spec = spec.for_concurrency(job.generate.concurrency).alone()
    # The start of an engine cannot be asked to finish a step: here SIGTERM ends the job at once.
    with contextlib.ExitStack() as stack:
        with sigterm_as_exit():
            server = stack.enter_context(Server.of(spec, out / "logs"))
            console.print("starting the engine", highlight=False)
            server.wait_ready()
        yield ["--endpoint", server.url]


def call(args: Sequence[str], name: str, log: Path, watch: Watch) -> None:
    """Run one sub-command in a process of its own, so that its memory is freed; its output also goes to `log`.

    Raises:
        JobError: it failed. StopRequested: it was asked to stop, and has ended. KeyboardInterrupt: Ctrl-C.
    """
    command = [*COMMAND, *args]
    environment = os.environ | ({VARIABLE: str(watch.progress_file)} if watch.progress_file else {})
    with _open_log(log) as file:
        # A session of its own: a Ctrl-C reaches the stage once, as the SIGTERM of `_end`; a second signal would end a
        # training without its checkpoint.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_job,
        )
        pump = threading.Thread(target=_copy, args=(process.stdout, file), daemon=True)
        pump.start()
        asked_at = math.inf
        try:
            while (code := process.poll()) is None:
                watch.tick()
                if watch.stops() and asked_at == math.inf:
                    asked_at = time.monotonic()
                    process.send_signal(signal.SIGTERM)
                if time.monotonic() - asked_at > PATIENCE_S:
                    process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        except BaseException:
            _end(process)
            raise
        finally:
            pump.join(timeout=5.0)
    if code == 0:
        return
    if watch.stops():
        raise StopRequested
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    raise JobError(f"the stage '{name}' ended with exit code {code}; see its message above, then run the job again")


def _end_with_job() -> None:
    """In the new process: SIGTERM if the job is killed, so that no stage goes on alone and holds its files."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """After Ctrl-C or an error here: the stage saves what it can and ends."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=60.0)
    except BaseException:  # a second Ctrl-C: at once
        process.kill()
        process.wait()
        raise


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise JobError(f"cannot write {path} ({error.strerror}); free space or make its folder writable") from error


def _copy(source: IO[bytes] | None, log: IO[bytes]) -> None:
    """Every byte of a stage's output to our stderr and to its log; the stage goes on if the log's disk is full."""
    assert source is not None
    while block := source.read1(1 << 16):  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):
            log.write(block)
            log.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(block.decode("utf-8", "replace"))
            sys.stderr.flush()


def _read_done(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise JobError(f"{path} is not the record of a job ({error}); delete it to run every stage again") from error


def _link_head(out: Path, last: str) -> None:
    link = out / "head"
    part = out / "head.part"
    part.unlink(missing_ok=True)
    part.symlink_to(Path("train") / last / "head")
    os.replace(part, link)
