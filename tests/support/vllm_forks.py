"""Processes of pytest that start in a second: forks of one that has imported vLLM.

Otherwise each process of tests/test_vllm_environment.py imports vLLM by itself, nine seconds of processor time. A fork
runs what ``python -m pytest`` runs, in an environment and with an output of its own.

As a script: the process that forks. It reads one JSON object per line from its input, and answers with the exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.context
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Without these vLLM asks the network, phones home, and reserves half of the memory; tests/conftest.py.
OF_ENGINES = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    **{"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: nothing outlives a test that fails
}
_forks: dict[Path, Forks] = {}


def run_pytest(python: Path, arguments: list[str], seconds: float) -> tuple[int, str]:
    """The exit code and the output of pytest in the environment of `python`; raises TimeoutError."""
    if python not in _forks:
        _forks[python] = Forks(python)
    return _forks[python].run(arguments, seconds)


class Forks:
    """The process of an environment that has imported vLLM."""

    def __init__(self, python: Path) -> None:
        self._python = python
        # Not the paths of this environment, which hold another transformers.
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OF_ENGINES
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), __file__],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            start_new_session=True,  # so that what a fork leaves ends with it
        )
        atexit.register(self.close)

    def run(self, arguments: list[str], seconds: float) -> tuple[int, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile() as output:
            print(json.dumps([arguments, output.name]), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                self.close()
                raise TimeoutError(f"pytest was stopped after {seconds} s:\n{printed(output.name)[-6000:]}")
            answer = self._process.stdout.readline()
            if not answer:
                self._printed.seek(0)
                ended = self._printed.read()[-2000:].decode(errors="replace")
                raise RuntimeError(f"the process that imports vLLM has ended:\n{ended}")
            return int(answer), printed(output.name)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _forks.pop(self._python, None)


def printed(file: str) -> str:
    return Path(file).read_text(errors="replace")


class Rank(multiprocessing.context.ForkServerProcess):
    """A process of an engine: with the environment of its start, as if it had been spawned."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), **options: Any) -> None:
        super().__init__(target=in_environment, args=(dict(os.environ), target, *args), **options)


class RankContext(multiprocessing.context.ForkServerContext):
    """In place of vLLM's on CPUs, which spawns every process of an engine: they are forks of one with its modules."""

    Process = Rank  # type: ignore[assignment]


def in_environment(environment: dict[str, str], target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


def fork_ranks() -> None:
    """Let the engines of this process make their processes so."""
    context = RankContext()
    context.set_forkserver_preload(["vllm_imports"])
    for name in ("vllm.v1.engine.coordinator", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        importlib.import_module(name).get_mp_context = lambda: context  # type: ignore[attr-defined]


def in_fork(function: Callable[..., Any], *arguments: Any) -> tuple[int, str]:
    """The exit code and the output of a fork of this process that runs a function as its main program."""
    with tempfile.NamedTemporaryFile() as output:
        fork = multiprocessing.get_context("fork").Process(target=printing_to, args=(output.name, function, *arguments))
        fork.start()
        fork.join(300)
        fork.kill()  # which changes nothing if it has ended
        fork.join()
        assert fork.exitcode is not None
        return fork.exitcode, printed(output.name)


def printing_to(output: str, function: Callable[..., Any], *arguments: Any) -> None:
    redirect(output)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))  # pytest has its own
    function(*arguments)


def redirect(output: str) -> None:
    """Let this process print to a file, and read nothing."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, of in ((0, nothing), (1, file), (2, file)):
        os.dup2(of, number)


def become(arguments: list[str], output: str) -> int:
    """In a fork: what ``python -m pytest`` does."""
    import pytest

    redirect(output)
    sys.argv = ["pytest", *arguments]
    return int(pytest.main(arguments))


def main() -> None:
    sys.path[:1] = [str(ROOT), str(Path(__file__).parent)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    importlib.import_module("vllm_imports")
    gc.collect()
    gc.freeze()  # no fork collects, and so copies, what all share
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            answers.close()
            sys.exit(become(*json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
