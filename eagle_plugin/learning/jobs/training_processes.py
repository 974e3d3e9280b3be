"""Runs one training in several processes on this machine, one per GPU, as `torchrun --nproc-per-node` does.

torchrun kills processes 30 seconds after a signal and hides how they ended. A stage of a job is given more time for its
checkpoint, and a process that lacked memory is told from one that failed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

import torch
import yaml

from eagle_plugin.bench.memory import KILLED
from eagle_plugin.learning.jobs.recipe import JobError, JobRecipe
from eagle_plugin.learning.jobs.stage import Stage
from eagle_plugin.learning.jobs.stage_process import INTERRUPTED, end_with_parent

MODULE = "eagle_plugin.learning.jobs.training_processes"
COMMAND = (sys.executable, "-m", "eagle_plugin.learning.train.command")
PATIENCE_S = 10.0  # for the others when one process has failed: they wait for it, and cannot save anything


def processes_of(stage: Stage, job: JobRecipe) -> int:
    """In how many processes a stage runs: a training in one per GPU that torch sees here, everything else in one.

    Raises:
        JobError: the recipe wants more processes than there are GPUs.
    """
    if not stage.recipe:
        return 1
    device = (yaml.safe_load(stage.recipe) or {}).get("device", "auto")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    wanted = job.train_processes
    if wanted is None:
        return max(1, gpus)
    if gpus and wanted > gpus:
        raise JobError(
            f"the recipe's train_processes is {wanted}, and torch sees {gpus} GPUs here; give at most {gpus}, or free "
            "more of them (CUDA_VISIBLE_DEVICES)"
        )
    return wanted


def run_processes(count: int, command: Sequence[str]) -> int:
    """Run a command in so many processes, which find each other; the exit code of the first that failed, or of all.

    SIGINT and SIGTERM reach each process as SIGTERM, with which it saves what it has.
    """
    processes: list[subprocess.Popen[bytes]] = []
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        _terminate(processes)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    for rank in range(count):
        own = {name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(subprocess.Popen([*command], env=os.environ | own, preexec_fn=end_with_parent))
    if asked:  # before the last of them was there
        _terminate(processes)
    while True:
        codes = [code for process in processes if (code := process.poll()) is not None]
        if failed := [code for code in codes if code not in (0, INTERRUPTED)]:
            _end(processes)
            code = next((code for code in failed if code in KILLED), failed[0])
            return code if code >= 0 else 128 - code
        if len(codes) == count:
            return max(codes)
        time.sleep(0.1)


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)  # not to one that was seen to end


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    _terminate(processes)
    end = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(run_processes(int(sys.argv[1]), [*COMMAND, *sys.argv[2:]]))
