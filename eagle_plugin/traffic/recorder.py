"""Takes exchanges without ever waiting: a bounded queue, and one thread that hands them to the writer process.

The filter of private data is slow and holds Python's lock, so it runs in a process of its own, with the least priority.
A pipe that is full stops the thread and never the server: what the queue cannot take is dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import eagle_plugin
from eagle_plugin.traffic.frames import Exchange, pack, pack_counts
from eagle_plugin.traffic.metrics import DROPPED
from eagle_plugin.traffic.settings import FOLDER, CaptureError, CaptureSettings

logger = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20
LONGEST = 16 << 20  # bytes of one exchange
START_SECONDS = 120.0  # of the writer, which imports the recognisers
COUNTS_EVERY = 1.0  # seconds
# The writer is a program of its own: servers import nothing of `learning`.
WRITER = "eagle_plugin.learning.data.traffic.writer"


def writer_command(settings: CaptureSettings, *options: str) -> list[str]:
    """The command line of the writer process."""
    return [settings.python or sys.executable, "-m", WRITER, settings.to_json(), *options]


def check_writer(settings: CaptureSettings) -> None:
    """Start the writer for a moment: is the filter installed, can the folder be written?

    Raises:
        CaptureError: with the writer's sentence.
    """
    process = _start(settings, "--check")
    try:
        _await_ready(process)
    finally:
        process.kill()  # it has nothing to lose, and its packages take seconds to end
        process.communicate()


class Recorder:
    """The writer process of one server process, and the queue before it.

    Raises:
        CaptureError: the writer does not start.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        show: Callable[[Counter[str]], None] = lambda totals: None,
        command: list[str] | None = None,
    ) -> None:
        """show gets the totals at most once per second, from the thread; command is for tests."""
        self._settings, self._show = settings, show
        self._waiting: deque[Exchange] = deque()
        self._bytes = self._sent = self._handled = 0
        self._own, self._written = Counter[str](), Counter[str]()
        self._changed = threading.Condition()
        self._closing = self._gone = False
        self._process = _start(settings, command=command)
        try:
            _await_ready(self._process)
        except CaptureError:
            self._process.kill()
            self._process.communicate()
            raise
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send_all, self._read_counts)]
        for thread in self._threads:
            thread.start()

    def offer(self, exchange: Exchange) -> None:
        """Queue an exchange, or drop and count it; returns at once."""
        with self._changed:
            if self._gone or self._closing:
                self._own[DROPPED + "writer_ended"] += 1
            elif len(exchange) > LONGEST:
                self._own[DROPPED + "too_large"] += 1
            elif self._bytes + len(exchange) > QUEUE_BYTES:
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
        try:
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            self._process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with self._changed:
                self._give_up()
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
                    pipe.write(pack(exchange))
                    pipe.flush()
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
        logger.warning(
            "eagle-plugin: the capture has ended, because its writer process %d ended with code %s; the server serves "
            "on; restart it to capture again",
            self._process.pid,
            self._process.poll(),
        )

    def _give_up(self) -> None:
        """Count what is queued, or was sent and not handled, as dropped."""
        self._gone = True
        self._own[DROPPED + "writer_ended"] += len(self._waiting) + self._sent - self._handled
        self._waiting.clear()
        self._bytes = 0


def _start(settings: CaptureSettings, *options: str, command: list[str] | None = None) -> subprocess.Popen[bytes]:
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    try:
        return subprocess.Popen(
            command or writer_command(settings, *options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread},
            start_new_session=True,  # a Ctrl-C is for the server; the writer ends when its input does
        )
    except OSError as error:
        raise CaptureError(f"the writer of the capture cannot start ({error}); correct {FOLDER}_PYTHON") from error


def _await_ready(process: subprocess.Popen[bytes]) -> None:
    """Read the writer's first line: its version, or its sentence."""
    watch = threading.Timer(START_SECONDS, process.kill)
    watch.start()
    line = process.stdout.readline() if process.stdout else b""
    watch.cancel()
    try:
        found = json.loads(line)
    except ValueError:
        code = process.wait()
        raise CaptureError(
            f"the writer of the capture ended with code {code} before it was ready; its error is above; correct it, "
            f"or unset {FOLDER}"
        ) from None
    if "error" in found:
        raise CaptureError(f"{FOLDER}: {found['error']}")
    if found.get("version") != eagle_plugin.__version__:
        raise CaptureError(
            f"{FOLDER}_PYTHON has eagle-plugin {found.get('version')}, wanted {eagle_plugin.__version__} as in the "
            "server; install it there"
        )
