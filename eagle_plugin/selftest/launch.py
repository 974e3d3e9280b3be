"""Asks for a launcher, in a process of its own, whether the plugin's worker may serve on its devices.

A launcher must not use CUDA itself: its workers may be forked, and they share the memory of the GPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_plugin.runtime.gpu import Gpu, unsupported_gpu
from eagle_plugin.selftest import record
from eagle_plugin.selftest.subject import Subject, failed_kernels

SECONDS = 900.0  # of the process: native kernels may have to be built
_COMMAND = (sys.executable, "-m", "eagle_plugin.selftest.launch")
# What a launcher was answered, for the processes that it starts: while they ask, the others measure free memory.
ANSWERED = "_EAGLE_PLUGIN_ANSWERED"


class Answer(NamedTuple):
    """What the process found."""

    reasons: list[str]  # why our worker must not serve; empty where it may
    log: list[str]  # lines for the log


def answer(subject: Subject, logger: logging.Logger) -> list[str]:
    """Why our worker must not serve on these devices; empty if it may. To be called in a process of its own.

    `failed_kernels` of each of them, after what the device itself must have.
    """
    devices = [torch.device("cuda", i) for i in range(subject.devices)]
    reasons = [_on(device, subject, logger) for device in (devices if subject.device == "cuda" else ["cpu"])]
    return list(dict.fromkeys(reason for of_device in reasons for reason in of_device))


def _on(device: torch.device | str, subject: Subject, logger: logging.Logger) -> list[str]:
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            if reasons := unsupported_gpu(Gpu.current(), subject.head_dims, [subject.shape["kv_cache"]]):
                return reasons
    return failed_kernels(subject, device, lambda value: [value], logger)  # this process tests the devices of all ranks


def ask(subject: Subject, command: Sequence[str] = _COMMAND, seconds: float = SECONDS) -> Answer:
    """`answer` of a process of its own; a process that fails is a reason too."""
    given = json.dumps(subject._asdict())
    try:
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Answer([f"the self-test of the kernels did not end within {seconds:.0f} s"], [])
    except OSError as error:
        return Answer([f"the self-test of the kernels could not be started: {error}"], [])
    if done.returncode:
        return Answer([f"the self-test of the kernels ended with exit code {done.returncode}"], [])
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


def tell_children(subject: Subject, reasons: Sequence[str]) -> None:
    """Leave the reasons of an `Answer` to the processes that this one starts."""
    os.environ[ANSWERED] = json.dumps({"by": os.getpid(), "of": _digest(subject), "reasons": list(reasons)})


def told_by_launcher(subject: Subject) -> Answer | None:
    """What the process that started this one was answered about the same subject; None where it has not asked.

    An answer of this process itself does not count: since then a round may have failed.
    """
    told = json.loads(os.environ.get(ANSWERED, "{}"))
    if not told or told["by"] == os.getpid() or told["of"] != _digest(subject):
        return None
    return Answer(told["reasons"], [])


def _digest(subject: Subject) -> str:
    """Of a subject, and of the folder whose records have decided."""
    asked = [str(record.folder()), subject._asdict()]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, logged: logging.LogRecord) -> None:
        self.lines.append(logged.getMessage())


def main() -> None:
    """Read a subject from standard input; the last line of standard output is the answer."""
    logger, lines = logging.getLogger("eagle_plugin.selftest.launch"), _Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    reasons = answer(Subject(**json.load(sys.stdin)), logger)
    print(json.dumps(Answer(reasons, lines.lines)._asdict()))


if __name__ == "__main__":
    main()
