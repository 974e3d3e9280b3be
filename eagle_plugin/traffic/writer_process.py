"""Takes what a server has for a writer process without ever waiting: a bounded queue, and one thread that sends it.

What the writer does is slow and holds Python's lock, so it is a process of its own. A pipe that is full stops the
thread and never the server: what the queue cannot take is dropped and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import eagle_plugin
from eagle_plugin.common.errors import UserError
from eagle_plugin.traffic.detached import SERVER
from eagle_plugin.traffic.frames import pack_counts
from eagle_plugin.traffic.metrics import DROPPED

logger = logging.getLogger(__name__)

# Not among the arguments, which every user of the machine sees: a URL may hold a password.
_SETTINGS = "_EAGLE_WRITER_SETTINGS"
START_SECONDS = 120.0  # of the writer, which imports its packages
COUNTS_EVERY = 1.0  # seconds
F_SETPIPE_SZ = 1031  # linux/fcntl.h; Python has it on Linux alone


class Sendable(Protocol):
    """What a writer gets: its bytes in the queue are `len`."""

    def __len__(self) -> int: ...

    def frame(self) -> Sequence[bytes | memoryview]:
        """What is sent, in parts that are not joined here."""


@dataclass(frozen=True)
class WriterKind:
    """What a writer process is started for, and how it is named in sentences."""

    what: str
    setting: str  # the variable with which the user asked for it
    error: type[UserError]
    command: list[str]
    settings: str  # for `writer_settings` in the writer
    most_bytes: int  # of the queue
    longest: int  # bytes of one frame
    pipe_bytes: int = 0  # that the pipe holds; 0: as many as the system gives it


class WriterProcess:
    """The writer process of one server process, and the queue before it.

    Raises:
        UserError: that of the kind; the writer does not start.
    """

    def __init__(self, kind: WriterKind, show: Callable[[Counter[str]], None] = lambda totals: None) -> None:
        """show gets the totals at most once per second, from the thread."""
        self._kind, self._show = kind, show
        self._waiting: deque[Sendable] = deque()
        self._bytes = self._sent = self._handled = 0
        self._own, self._written = Counter[str](), Counter[str]()
        self._changed = threading.Condition()
        self._closing = self._gone = False
        self._process = _start(kind)
        try:
            _await_ready(kind, self._process)
        except UserError:
            _kill(self._process)
            raise
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send_all, self._read_counts)]
        for thread in self._threads:
            thread.start()

    def offer(self, exchange: Sendable) -> None:
        """Queue an exchange, or drop and count it; returns at once."""
        with self._changed:
            if self._gone or self._closing:
                self._own[DROPPED + "writer_ended"] += 1
            elif len(exchange) > self._kind.longest:
                self._own[DROPPED + "too_large"] += 1
            elif self._bytes + len(exchange) > self._kind.most_bytes:
                self._own[DROPPED + "queue_full"] += 1
            else:
                self._waiting.append(exchange)
                self._bytes += len(exchange)
                self._changed.notify()

    def drop(self, reason: str) -> None:
        """Count an exchange that is not recorded."""
        with self._changed:
            self._own[DROPPED + reason] += 1

    def totals(self) -> Counter[str]:
        """What was counted so far, here and by the writer."""
        with self._changed:
            return self._own + self._written

    def close(self, seconds: float = 10.0) -> None:
        """Let the writer finish what is queued, for at most so many seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        end = time.monotonic() + seconds
        for thread in self._threads:  # the last one ends when the writer does
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _kill_group(self._process)
            with self._changed:
                self._give_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._show(self.totals())

    def _send_all(self) -> None:
        pipe: Any = self._process.stdin
        shown = time.monotonic()
        try:
            while True:
                with self._changed:
                    if not self._waiting and not self._closing:
                        self._changed.wait(COUNTS_EVERY)
                    exchange = self._waiting.popleft() if self._waiting else None
                    self._bytes -= len(exchange) if exchange else 0
                    own, ends = self._own.copy(), self._closing and exchange is None
                    self._sent += exchange is not None
                if exchange is not None:
                    for part in exchange.frame():
                        pipe.write(part)
                    pipe.flush()
                    exchange = None  # its memory is free while the next one is waited for
                if (now := time.monotonic()) - shown >= COUNTS_EVERY or ends:
                    shown = now
                    pipe.write(pack_counts(own))  # also unchanged: the writer answers with its own
                    pipe.flush()
                    self._show(self.totals())
                if ends:
                    pipe.close()
                    return
        except OSError:
            self._end()

    def _read_counts(self) -> None:
        answers: Any = self._process.stdout
        for line in answers:
            with self._changed:
                self._written = Counter(json.loads(line))
                self._handled = self._written.pop("exchanges", 0)
        if not self._closing:
            self._end()

    def _end(self) -> None:
        """The writer is gone: nothing is recorded any more, and the server serves on."""
        with self._changed:
            if self._gone:
                return
            self._give_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()  # of one that was detached nobody knows it
        logger.warning(
            "eagle-plugin: the %s has ended, because its writer process ended%s; the server serves on; restart it to "
            "%s again",
            self._kind.what,
            f" with code {code}" if code else "",
            self._kind.what.split()[0],
        )

    def _give_up(self) -> None:
        """Count what is queued, or was sent and not handled, as dropped; once."""
        if self._gone:
            return
        self._gone = True
        self._own[DROPPED + "writer_ended"] += len(self._waiting) + self._sent - self._handled
        self._waiting.clear()
        self._bytes = 0


def writer_settings() -> str:
    """In a writer: the settings of its kind."""
    return os.environ[_SETTINGS]


def _start(kind: WriterKind, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    try:
        process = subprocess.Popen(
            [*kind.command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread, _SETTINGS: kind.settings, SERVER: str(os.getpid())},
            start_new_session=True,  # a Ctrl-C is for the server; the writer ends when its input does
        )
    except OSError as error:
        reason = f"the writer of the {kind.what} cannot start ({error}); correct {kind.setting}_PYTHON"
        raise kind.error(reason) from error
    if kind.pipe_bytes and process.stdin:
        with contextlib.suppress(OSError):  # more than this user may have: it is slower, and works
            fcntl.fcntl(process.stdin, F_SETPIPE_SZ, kind.pipe_bytes)
    return process


def _await_ready(kind: WriterKind, process: subprocess.Popen[bytes]) -> None:
    """Read the writer's first line: its version, or its sentence."""
    watch = threading.Timer(START_SECONDS, _kill_group, [process])
    watch.start()
    line = process.stdout.readline() if process.stdout else b""
    watch.cancel()
    try:
        found = json.loads(line)
    except ValueError:
        code = process.wait()
        raise kind.error(
            f"the writer of the {kind.what} ended with code {code} before it was ready; its error is above; correct "
            f"it, or unset {kind.setting}"
        ) from None
    if "error" in found:
        raise kind.error(f"{kind.setting}: {found['error']}")
    if found.get("version") != eagle_plugin.__version__:
        raise kind.error(
            f"{kind.setting}_PYTHON has eagle-plugin {found.get('version')}, wanted {eagle_plugin.__version__} as in "
            "the server; install it there"
        )
    process.poll()  # a detached writer has left this process, which has ended


def check_writer(kind: WriterKind) -> None:
    """Start the writer for a moment with `--check`.

    Raises:
        UserError: that of the kind, with the writer's sentence.
    """
    process = _start(kind, ["--check"])
    try:
        _await_ready(kind, process)
    finally:
        _kill(process)  # it has nothing to lose, and its packages take seconds to end


def _kill(process: subprocess.Popen[bytes]) -> None:
    _kill_group(process)
    process.communicate()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a writer, detached or not: it leads a group of its own, in which its child stays."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
