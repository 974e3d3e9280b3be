"""An engine's OpenAI server as a child process: start, wait, pause, and always stop it with its process group."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import httpx

from eagle_plugin.bench.engine import Engine, EngineEndpoint
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.memory import available_bytes, enough_to_try_again, gib, lacked_memory, least_bytes
from eagle_plugin.bench.orphans import Guard
from eagle_plugin.bench.process_group import cpu_clock_of, members_of, memory_bytes_of
from eagle_plugin.bench.spec import Mode, ServerSpec
from eagle_plugin.bench.start_log import StartLog

LAST_LINES = 25  # of a log, in an error
PLUGIN_LINE = re.compile(r"eagle-plugin .*")  # a line of the plugin in the start-up log
OWN_LINE = re.compile(r"eagle-plugin(?: \d[\w.+]*)?: .*")  # the same, and what it ends a start with
SERVING = re.compile(r"is served by the plugin")  # the part of such a line that means: the plugin's worker serves
HANDED_OVER = re.compile(r"is served by \w+'s own worker")  # the engine's serves; also after a line of the other kind


class ServerError(RuntimeError):
    """A server did not start, ended too early, or uses another worker than the one asked for."""


class OutOfMemory(ServerError):
    """A server ended for lack of memory; it can be started again when there is enough."""

    def __init__(self, message: str, wanted: int) -> None:
        super().__init__(message)
        self.wanted = wanted  # bytes that should be free before another try


def child_environment(spec: ServerSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: local model files only, and the plugin is on only in mode "plugin", where the caller's
    EAGLE_PLUGIN=force stays. No key of vLLM's API: with one the server would refuse our own questions."""
    child = {**base, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    child.pop("VLLM_API_KEY", None)
    on = "force" if base.get("EAGLE_PLUGIN") == "force" else "1"
    child["EAGLE_PLUGIN"] = on if spec.mode == "plugin" else "0"
    return child | ENGINES[spec.engine].environment(spec, base) | dict(spec.environment)


class Server:
    """One server process in its own process group; used as a context manager, it always stops the whole group."""

    started: ClassVar[int] = 0  # by this process, until now
    running: ClassVar[set[Server]] = set()  # of these, those that are not stopped

    def __init__(
        self,
        command: list[str],
        port: int,
        label: str,
        log: Path,
        environment: Mapping[str, str],
        engine: Engine = ENGINES["sglang"],
        directory: Path | None = None,
        needed: int = 0,
        mode: Mode | None = None,
    ) -> None:
        """needed: bytes of memory that the server takes at the least; 0 if unknown. mode: what has to serve, if known;
        where it is "plugin", `wait_ready` does not wait for a server that the plugin has left to the engine."""
        self.command, self.port, self.label, self.log = command, port, label, log
        self.directory, self.needed, self.mode = directory, needed, mode
        self._available = 0  # bytes, when it was started
        self.environment = dict(environment)
        self.url = f"http://127.0.0.1:{port}"
        self.endpoint = EngineEndpoint(self.url, engine)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._began = 0.0

    @classmethod
    def of(cls, spec: ServerSpec, logs: Path, port: int | None = None) -> Server:
        """A server for this spec on the given port or a free one, logging to `logs/<label>.log`.

        Raises:
            ServerError: another program listens on the given port.
        """
        if port is None:
            port = free_port()
        else:
            check_port(port)
        engine = ENGINES[spec.engine]
        environment = child_environment(spec, os.environ)
        command, log = engine.command(spec, port), logs / f"{spec.label}.log"
        return cls(command, port, spec.label, log, environment, engine, spec.directory, least_bytes(spec), spec.mode)

    def start(self) -> Server:
        """Launch the process without waiting for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._available = available_bytes()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.directory,
                start_new_session=True,  # a Ctrl-C goes to this process only, which then stops the group
            )
        self._began = time.monotonic()
        Server.started += 1
        Server.running.add(self)
        atexit.register(self.stop)
        self._guard = Guard(self._process.pid)
        return self

    def wait_ready(self, silence_s: float = 600.0, progress: Callable[[str], None] = lambda line: None) -> float:
        """Wait until the server answers `/health`; returns the seconds since its start.

        A large target may load and compile for longer than any limit; an engine prints meanwhile how far it is.

        Raises:
            ServerError: it ended, or it printed nothing for `silence_s` seconds, or nothing new (`StartLog`), or the
                plugin has left it to the engine's own worker.
        """
        log = StartLog(self.log, self._began)
        with httpx.Client(base_url=self.url, timeout=15.0, trust_env=False) as client:
            while True:
                self.check_alive("before it was ready")
                now = time.monotonic()
                log.read(now)
                if lack := log.lack(now, silence_s):
                    raise ServerError(
                        self._failure(f"was not ready after {now - self._began:.0f} s, of which it {lack}")
                    )
                if self.mode == "plugin" and HANDED_OVER.search(_last(PLUGIN_LINE, self.log_text())):
                    check_worker(self, self.mode)
                progress(f"{self.label}, {now - self._began:.0f} s")
                with contextlib.suppress(httpx.TransportError):  # not listening yet
                    if client.get("/health").status_code == 200:
                        return time.monotonic() - self._began
                time.sleep(0.5)

    def check_alive(self, when: str = "while it was being used") -> None:
        """Raise ServerError with the last log lines if the process has ended, OutOfMemory if that was the reason."""
        code = None if self._process is None else self._process.poll()
        if self._process is None or code is not None:
            if lacked_memory(code, self.log_text()):
                raise OutOfMemory(self._lack(code, when), enough_to_try_again(self._available, self.needed))
            raise ServerError(self._failure(f"ended with exit code {code} {when}"))

    def pause(self) -> None:
        """Stop the whole group with SIGSTOP, so that it uses no CPU time while another server is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused group."""
        self._signal(signal.SIGCONT)

    def stop(self, grace_s: float = 10.0) -> None:
        """End every process of the group: SIGTERM first, SIGKILL after `grace_s`; a second call does nothing."""
        if self._process is None:
            return
        atexit.unregister(self.stop)
        self._signal(signal.SIGCONT)  # a paused process would handle SIGTERM only after it continues
        for request, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            self._signal(request)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self._process.poll()
                if not self.members():
                    self._process.wait()
                    self._process = None
                    Server.running.discard(self)
                    if self._guard is not None:  # until now: this process may be killed while it waits
                        self._guard.dismiss()
                        self._guard = None
                    return
                time.sleep(0.1)
        raise ServerError(f"{self.label}: processes {self.members()} survived SIGKILL; end them by hand")

    def members(self) -> list[int]:
        """The ids of the group's processes that still run (zombies are left out)."""
        return [] if self._process is None else members_of(self._process.pid)

    def cpu_clock(self) -> Callable[[], float]:
        """A function that gives the processor time, in seconds, of the processes that the group has now."""
        return cpu_clock_of(self.members())

    def memory_bytes(self) -> int:
        """Memory of the group's processes; what they share counts once (Linux's PSS, elsewhere the resident size)."""
        return memory_bytes_of(self.members())

    def log_text(self) -> str:
        """Everything that the server has printed until now."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def last_lines(self) -> str:
        """The last printed lines, for error messages; long lines (an engine prints all its settings) are shortened."""
        lines = self.log_text().splitlines()[-LAST_LINES:]
        return "\n".join(f"  | {textwrap.shorten(line, 240, placeholder=' ...')}" for line in lines) or "  | (nothing)"

    def _lack(self, code: int | None, when: str) -> str:
        """One sentence; the last lines of a server that the system killed say nothing of it."""
        needs = f"its weights and cache need at least {gib(self.needed)}" if self.needed else "it needs more"
        return (
            f"{self.label} server ended with exit code {code} {when}, most likely for lack of memory: "
            f"{gib(self._available)} were free when it started, and {needs}, beside what the engine itself takes; end "
            "other programs, or let it serve fewer requests at a time with --concurrency (generate.concurrency of a "
            f"job); its log is {self.log}"
        )

    def _failure(self, what: str) -> str:
        own = _last(OWN_LINE, self.log_text())  # it may be far above the last lines, and is the reason
        own_part = f"; the plugin logged {own!r}" if own else ""
        return f"{self.label} server {what}{own_part}; the last lines of {self.log}:\n{self.last_lines()}"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the group may have ended by itself
                os.killpg(self._process.pid, number)

    def __enter__(self) -> Server:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    """A loopback TCP port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise ServerError where a server cannot listen on this loopback port.

    An engine finds that out after it has loaded its model, and some go on without a listener. Whoever listens there
    would answer in the place of the server.
    """
    with socket.socket() as probe:
        # Closed connections of an earlier server may linger; a listener is found all the same.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); stop the program that listens there, "
                "name another port with --port, or leave --port out for a free one"
            ) from error


def _last(line: re.Pattern[str], log: str) -> str:
    """The last such line of a start-up log, "" where there is none."""
    lines = line.findall(log)
    return str(lines[-1]).rstrip() if lines else ""


def check_worker(server: Server, mode: Mode) -> str:
    """Check in the start-up log that the worker that was asked for really serves.

    Returns the plugin's line, or "" if the plugin does not serve. Raises ServerError otherwise: an engine ignores the
    failure of a plugin and continues with its own worker, which would then be measured under a wrong name.
    """
    lines = PLUGIN_LINE.findall(server.log_text())
    serving = [line for line in lines if SERVING.search(line)]
    if mode == "plugin" and (not serving or HANDED_OVER.search(lines[-1])):
        logged = f"it logged {lines[-1]!r}" if lines else f"no line of it in {server.log}"
        raise ServerError(
            f"{server.label}: the plugin does not serve: {logged}; install eagle-plugin into the engine's environment, "
            f"unset {server.endpoint.engine.plugin_list}, and use flags that the plugin can serve"
        )
    if mode != "plugin" and serving:
        raise ServerError(
            f"{server.label}: the plugin serves, but the engine alone was asked for ({serving[-1]!r}); "
            "EAGLE_PLUGIN=0 was set for this process, so find the start-up script that sets it again"
        )
    return serving[-1] if serving else ""
