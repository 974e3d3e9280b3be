"""Engines of steps `model` and `vllm-model` in processes of their own, asked over pipes."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.groups import last_error, running
from benchmarks.gpu.model_cases import CASES, Case, environment
from benchmarks.gpu.steps import Setting, StepError

START_LIMIT = {True: 200.0, False: 900.0}  # seconds, on a GPU and on a CPU; the engines start at the same time
ANSWER_LIMIT = 120.0
SHOWN = 5000  # characters of the log of an engine that does not answer


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, case: Case, process: subprocess.Popen[str], log: Path) -> None:
        self.case = case
        self._process, self._log = process, log
        self._start_seconds: float | None = None

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_start(self, limit: float) -> float:
        """How many seconds the start took; StepError with the reason when it does not start in so many from now."""
        if self._start_seconds is None:
            self._start_seconds = float(self._read(limit)["start_seconds"])
        return self._start_seconds

    def end(self) -> None:
        """End it at once; its memory is free then."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, prompts: list[list[int]], temperature: float, tokens: int, forget: bool = False) -> dict[str, Any]:
        """Send requests at the same time. text: token ids; tokens, rounds: of all requests; seconds: until the last.

        forget: with an empty prefix cache. StepError when it does not answer.
        """
        assert self._process.stdin is not None
        batch = {"prompts": prompts, "temperature": temperature, "tokens": tokens, "forget": forget}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(batch) + "\n")
            self._process.stdin.flush()
        return self._read(ANSWER_LIMIT)

    def _read(self, limit: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(limit) else ""
        if not line:
            text = self.log()
            print(text[-SHOWN:])
            found_in = last_error(text) if self._process.poll() is not None else f"{limit:.0f} s are over, see its log"
            raise StepError(f"{self.case.what} does not answer: {found_in}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(
    name: str, target: Path, head: Path, folder: Path, setting: Setting, eager: bool = False
) -> Iterator[EngineProcess]:
    """An engine that starts; all its processes end with the context. folder: for its log."""
    engine = setting.engine or "sglang"
    case, log = CASES[engine][name], folder / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.model_engine", engine, name, "--device", setting.device]
    command += ["--target", str(target), "--head", str(head), *(["--eager"] if eager else [])]
    more, pipe = environment(engine, case, setting.on_gpu), subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as file,
        running(command, more, stdin=pipe, stdout=pipe, stderr=file) as process,
    ):
        yield EngineProcess(case, process, log)
