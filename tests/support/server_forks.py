"""SGLang servers that start in a second: forks of a process that has imported the engine once.

Otherwise each of a server's three processes imports SGLang by itself, 11 s of processor time each: nearly all that a
start with a tiny model consists of. Nothing else differs: a fork gets the command line, the environment and the log of
its server, and runs what ``python -m sglang.launch_server`` runs; the engine's own processes are forks of it.

Other scripts that import SGLang run in such forks too (`run_forked`).

As a script: the process that forks. It reads one JSON object per line from its input and answers with one.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.bench.servers import Server

# What the engine's modules and the plugin read when they are used, so that a fork may have other values than the
# process that imported the modules. PYTHONPATH is among them because a fork looks for the added folders itself.
READ_LATE = {
    *("EAGLE_PLUGIN", "EAGLE_POLICY", "EAGLE_POLICY_LOG_SECONDS", "EAGLE_OVERLAP", "EAGLE_GRAPHS", "EAGLE_SELFTEST"),
    *("EAGLE_LOOKUP", "EAGLE_DEPLOY", "EAGLE_FEATURES"),
    *("EAGLE_CAPTURE", "EAGLE_CAPTURE_PRIVACY", "EAGLE_CAPTURE_PYTHON"),
    *("EAGLE_CACHE_DIR", "EAGLE_TEST_FAULT", "EAGLE_TEST_WAITS", "EAGLE_TEST_WAITS_CONTROL"),
    *(
        "SGLANG_TEST_RETRACT",
        "SGLANG_TEST_RETRACT_INTERVAL",
    ),  # by the scheduler's module when it is imported: see become
    *("PYTHONPATH", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_MAMBA_CONV_DTYPE", "PYTEST_CURRENT_TEST"),
}
# What a server of one thread has besides the variables of this process; bench/servers.py and bench/sglang_server.py.
OF_SERVERS = {
    **{"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
}
LAUNCH = ["-m", "sglang.launch_server"]


def environment_of_imports(first_path: str = "") -> dict[str, str]:
    """The environment in which the engine would be imported now; first_path: a folder of modules before all others."""
    paths = filter(None, [first_path, os.environ.get("PYTHONPATH", "")])
    return dict(os.environ) | OF_SERVERS | {"PYTHONPATH": os.pathsep.join(paths)}


class Forks:
    """A process that has imported SGLang."""

    def __init__(self, first_path: str = "") -> None:
        self.environment = environment_of_imports(first_path)
        self._asking = threading.Lock()  # servers are stopped side by side
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            start_new_session=True,  # a Ctrl-C goes to pytest, which stops the servers
        )
        atexit.register(self.close)

    def ask(self, **request: Any) -> Any:
        """The answer to one request; raises RuntimeError with what was printed if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with self._asking:
                print(json.dumps(request), file=self._process.stdin, flush=True)
                return json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            self._printed.seek(0)
            printed = self._printed.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"the process that forks SGLang's servers has ended:\n{printed}") from error

    def close(self) -> None:
        """End it; the servers are stopped by their own :class:`Server`."""
        self._process.communicate()


_made: dict[str, Forks] = {}  # by the folder of modules that come first


def forks(first_path: str = "") -> Forks:
    """The one of this process, made when the first server is started."""
    if first_path not in _made:
        _made[first_path] = Forks(first_path)
    return _made[first_path]


class ForkedProcess:
    """What :class:`Server` needs of a ``subprocess.Popen``, for a child of the process that forks."""

    def __init__(self, parent: Forks, **request: Any) -> None:
        self._parent, self.pid = parent, parent.ask(**request)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode


class ForkedServer(Server):
    """An SGLang server of :meth:`Server.of` that is forked."""

    first_path = ""  # a folder of modules that SGLang is imported with

    def start(self) -> ForkedServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        directory = str(self.directory or Path.cwd())
        arguments = self.command[1 + len(LAUNCH) :]
        self._process = ForkedProcess(  # type: ignore[assignment]
            forks(self.first_path),
            **{"arguments": arguments, "environment": self.environment, "log": str(self.log), "directory": directory},
        )
        self._began = time.monotonic()
        atexit.register(self.stop)
        return self


def run_forked(script: Path, arguments: Sequence[str], log: Path, **environment: str) -> int:
    """Run a script that imports SGLang, with these variables; its output is in the log. Returns its exit code."""
    request = {"script": str(script), "arguments": list(arguments), "log": str(log), "directory": str(Path.cwd())}
    return ForkedProcess(forks(), **request, environment=environment_of_imports() | environment).wait()


def can_fork(server: Server) -> bool:
    """Whether this server's environment is one that the process that forks can give to its modules after importing."""
    if server.command[: 1 + len(LAUNCH)] != [sys.executable, *LAUNCH]:
        return False
    imported = _made[""].environment if "" in _made else environment_of_imports()
    names = (imported.keys() | server.environment.keys()) - READ_LATE
    return all(imported.get(name) == server.environment.get(name) for name in names)


def become(request: dict[str, Any]) -> None:
    """Make this fork look like a process that was started with this command line, environment, log and folder."""
    import importlib
    import multiprocessing
    import random

    import numpy as np
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    os.setsid()
    log, nothing = (
        os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
        os.open(os.devnull, os.O_RDONLY),
    )
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = added
    importlib.invalidate_caches()
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    sys.argv = [request.get("script", "launch_server.py"), *request["arguments"]]
    # The engine asks for "spawn", which imports everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None  # type: ignore[method-assign]
    # Forks of one process would otherwise draw the same ports and seeds.
    random.seed()
    np.random.seed()
    torch.seed()


def main() -> None:
    """Import the engine; then fork a server for each request, or tell the exit code of one, until the input ends."""
    import gc
    import runpy

    # Whatever the imports print goes to the log; the answers have the output to themselves.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
            answer = codes.get(pid)
        else:
            sys.stdout.flush()
            answer = os.fork()
            if answer == 0:
                os.close(channel.fileno())
                become(request)
                if "script" in request:
                    runpy.run_path(request["script"], run_name="__main__")
                else:
                    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
                return
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
