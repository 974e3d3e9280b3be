"""A stage of a job as a process of its own: its output and its log, its end, and a request to stop."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from eagle_plugin.bench.memory import KILLED, available_bytes, enough_to_try_again, gib
from eagle_plugin.common.progress import VARIABLE
from eagle_plugin.learning.jobs.recipe import JobError
from eagle_plugin.learning.jobs.watch import Watch

COMMAND = (sys.executable, "-m", "eagle_plugin.cli")
INTERRUPTED = 130
PATIENCE_S = 600.0  # for the step that a stopped stage finishes, such as one update of the training
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec


class StopRequested(Exception):
    """The job was asked to stop; what its stages have made is kept."""


class StageKilled(JobError):
    """The system killed a stage, most likely for lack of memory; what it has made is kept."""

    def __init__(self, message: str, wanted: int) -> None:
        super().__init__(message)
        self.wanted = wanted  # bytes that should be free before another try


def call(args: Sequence[str], name: str, log: Path, watch: Watch, module: str | None = None) -> None:
    """Run one sub-command in a process of its own, so that its memory is freed; its output also goes to `log`.

    module: a module that Python runs, in place of a sub-command of eagle-plugin.

    Raises:
        JobError: it failed; StageKilled: the system killed it. StopRequested: it was asked to stop, and has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    command = [*(COMMAND if module is None else (sys.executable, "-m", module)), *args]
    environment = os.environ | ({VARIABLE: str(watch.progress_file)} if watch.progress_file else {})
    free = available_bytes()
    with _open_log(log) as file:
        # A session of its own: a Ctrl-C reaches the stage once, as the SIGTERM of `_end`; a second signal would end a
        # training without its checkpoint.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
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
    if code in KILLED:
        raise StageKilled(
            f"the stage '{name}' was killed (signal 9), as the system does when memory runs out: {gib(free)} were free "
            "when it began, and it needed more; end other programs, give a training a smaller batch_tokens, or run the "
            "job on a machine with more memory",
            enough_to_try_again(free),
        )
    raise JobError(f"the stage '{name}' ended with exit code {code}; see its message above, then run the job again")


def end_with_parent() -> None:
    """In a new process: SIGTERM if its parent is killed, so that no stage goes on alone and holds its files."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """After Ctrl-C or an error here: the stage saves what it can and ends."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=PATIENCE_S)
    except BaseException as error:  # a second Ctrl-C: at once
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
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
