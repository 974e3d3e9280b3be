"""Engines of steps `model` and `vllm-model` in processes of their own, asked over pipes."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.model_cases import CASES, Case, environment
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.bench.orphans import Guard

ROOT = Path(__file__).resolve().parents[2]
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
            reason = re.findall(r"^\S*(?:Error|Exception)\b[^\n]*", text, re.MULTILINE)
            raise StepError(f"{self.case.what} does not answer: {reason[-1] if reason else 'see the log'}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(name: str, target: Path, head: Path, folder: Path, setting: Setting) -> Iterator[EngineProcess]:
    """An engine that starts; all its processes end with the context."""
    engine = setting.engine or "sglang"
    case, log = CASES[engine][name], folder / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.model_engine", engine, name, "--device", setting.device]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*command, "--target", str(target), "--head", str(head)],
            cwd=ROOT,
            env=os.environ | environment(engine, case, setting.on_gpu),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
        guard = Guard(process.pid)
        try:
            yield EngineProcess(case, process, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.dismiss()
