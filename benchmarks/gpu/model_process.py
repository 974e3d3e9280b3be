"""Engines of steps `model` and `vllm-model` in processes of their own, asked over pipes."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.groups import last_error, running
from benchmarks.gpu.model_cases import CASES, Case, environment
from benchmarks.gpu.steps import Setting, StepError

START_LIMIT, ANSWER_LIMIT = 300, 120  # seconds
SHOWN = 5000  # characters of the log of an engine that does not answer


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, case: Case, process: subprocess.Popen[str], log: Path) -> None:
        self.case = case
        self._process, self._log = process, log

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_start(self) -> float:
        """How many seconds the start took; StepError with the reason when it does not start."""
        return float(self._read(START_LIMIT)["start_seconds"])

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
            raise StepError(f"{self.case.what} does not answer: {last_error(text)}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(name: str, target: Path, head: Path, folder: Path, setting: Setting) -> Iterator[EngineProcess]:
    """An engine that starts; all its processes end with the context."""
    engine = setting.engine or "sglang"
    case, log = CASES[engine][name], folder / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.model_engine", engine, name, "--device", setting.device]
    with log.open("w", encoding="utf-8") as file:
        command += ["--target", str(target), "--head", str(head)]
        more, pipe = environment(engine, case, setting.on_gpu), subprocess.PIPE
        with running(command, more, stdin=pipe, stdout=pipe, stderr=file) as process:
            yield EngineProcess(case, process, log)
