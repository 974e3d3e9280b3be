"""Programs that start others: all of them end together, and the reason is read from what they printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eagle_plugin.bench.orphans import Guard

ROOT = Path(__file__).resolve().parents[2]
READ_SECONDS = 5.0  # for the last lines of a program that has ended


@contextmanager
def running(command: Sequence[str], more: Mapping[str, str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own, which ends with the context, or with this process if it is killed.

    more: variables beside those of this process. streams: of `subprocess.Popen`.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | dict(more), text=True, start_new_session=True, **streams
    )
    guard = Guard(process.pid)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        guard.dismiss()


def run_shown(command: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and print every line of it at once: a step that is ended has them in its log."""
    pipe, found = subprocess.PIPE, {"stdout": "", "stderr": ""}
    with running(
        command, {"PYTHONUNBUFFERED": "1"} | dict(more or {}), stdout=pipe, stderr=pipe, errors="replace"
    ) as process:

        def read(name: str) -> None:
            for line in getattr(process, name):
                print(line, end="", flush=True)
                found[name] += line

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in found]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            reader.join(READ_SECONDS)  # what it has started may keep its pipes open
    return subprocess.CompletedProcess(command, code, **found)


def last_error(text: str) -> str:
    """The last line of a log that names an exception."""
    found = re.findall(r"^\S*(?:Error|Exception)\b[^\n]*", text, re.MULTILINE)
    return str(found[-1]) if found else "see the log"
