"""Engines in processes of their own, asked over pipes."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.groups import last_error, running
from benchmarks.gpu.model_cases import CASES, GRAPHS, environment, sglang_arguments, vllm_arguments
from benchmarks.gpu.steps import Setting, StepError

START_LIMIT = {True: 200.0, False: 900.0}  # seconds, on a GPU and on a CPU; the engines start at the same time
ANSWER_LIMIT = 120.0
SERVES = "is served by the plugin's draft trees"  # in the start-up line, as in eagle_plugin/bench, which needs httpx
OTHERS = r"eagle-plugin [^\n]*is served by (?:SGLang|vLLM)'s own worker[^\n]*"  # why, in a log
WITHOUT_GRAPHS = r"there is no memory for the CUDA graphs of batches of ([\d, ]+) requests"
SHOWN = 5000  # characters of the log of an engine that does not answer


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, case: Any, process: subprocess.Popen[str], log: Path, mode: str = "") -> None:
        """case: how it was started; `case.what` says it in words. mode: of `model_cases.modes_of`."""
        self.case, self.mode = case, mode
        self._process, self._log = process, log
        self._start_seconds: float | None = None

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def has_started(self) -> bool:
        """Whether its start has ended, whoever serves."""
        return self._start_seconds is not None

    def wait_for_start(self, limit: float) -> float:
        """How many seconds the start took; StepError with the reason when it does not start in so many from now."""
        if self._start_seconds is None:
            self._start_seconds = float(self._read(limit)["start_seconds"])
        return self._start_seconds

    def wait_until_it_serves(self, limit: float) -> float:
        """Seconds of the start; StepError where it does not start or another worker than the plugin's serves."""
        seconds, log = self.wait_for_start(limit), self.log()
        # A worker whose self-test failed in the real round hands over after it has logged that it serves.
        others = re.findall(OTHERS, log)
        if self.case.plugin and (others or SERVES not in log):
            reason = others[0] if others else "the engine's log has no reason"
            raise StepError(f"{self.case.what}: the plugin does not serve: {reason}")
        return seconds

    def without_graphs(self) -> list[int]:
        """The batch sizes for whose graphs the plugin found no memory, as its log says."""
        found = re.findall(WITHOUT_GRAPHS, self.log())
        return sorted({int(size) for sizes in found for size in sizes.split(",")})

    def end(self) -> None:
        """End it at once; its memory is free then."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(
        self, prompts: list[list[int]], temperature: float, tokens: int, forget: bool = False, timed: bool = False
    ) -> dict[str, Any]:
        """`ask_each` of requests that are alike, within ANSWER_LIMIT."""
        parameters = {"temperature": temperature, "tokens": tokens}
        return self.ask_each(prompts, [parameters] * len(prompts), ANSWER_LIMIT, forget, timed)

    def ask_each(
        self,
        prompts: list[list[int]],
        parameters: list[dict[str, Any]],
        limit: float,
        forget: bool = False,
        timed: bool = False,
    ) -> dict[str, Any]:
        """What `model_engine.answer` says of requests that are sent at the same time, or `measure` if timed.

        forget: with an empty prefix cache. StepError when it does not answer within so many seconds.
        """
        assert self._process.stdin is not None
        batch = {"prompts": prompts, "parameters": parameters, "forget": forget, "timed": timed}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(batch) + "\n")
            self._process.stdin.flush()
        return self._read(limit)

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
def serving(
    case: Any, engine: str, arguments: dict[str, Any], more: dict[str, str], log: Path, mode: str = ""
) -> Iterator[EngineProcess]:
    """An engine that starts; all its processes end with the context. more: variables of its environment."""
    command = [sys.executable, "-m", "benchmarks.gpu.model_engine", engine, "--arguments", json.dumps(arguments)]
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as file,
        running(command, more, stdin=pipe, stdout=pipe, stderr=file) as process,
    ):
        yield EngineProcess(case, process, log, mode)


def started(
    name: str, target: Path, head: Path, folder: Path, setting: Setting, mode: str = ""
) -> AbstractContextManager[EngineProcess]:
    """An engine of steps `model` and `vllm-model`. folder: for its log."""
    engine, on_gpu = setting.engine or "sglang", setting.on_gpu
    case = CASES[engine][name]
    if engine == "vllm":
        arguments = vllm_arguments(case, target, head, on_gpu, mode)
    else:
        arguments = sglang_arguments(case, target, head, on_gpu)
    log = folder / f"{name}{'-graphs' if engine == 'vllm' and mode == GRAPHS else ''}.log"
    return serving(case, engine, arguments, environment(engine, case, on_gpu), log, mode)
