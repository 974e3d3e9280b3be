"""A training of a job in several processes: how many, how they find each other, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from job_worlds import PretendedStages
from rich.console import Console
from training_runs import distance, extract_features, newest, recipe, run_training, write_recipe, write_rows

from eagle_plugin.learning.jobs import runner
from eagle_plugin.learning.jobs.recipe import JobError, read_job
from eagle_plugin.learning.jobs.training_processes import MODULE

ROOT = Path(__file__).parents[2]
START = "import sys; from eagle_plugin.learning.jobs.training_processes import run_processes\n"
START += "sys.exit(run_processes(int(sys.argv[1]), [sys.executable, '-c', *sys.argv[2:]]))"
WAIT_S = 300.0  # for processes to start on a busy machine
NAMES = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
TELLS = f"""
import os, pathlib, sys
values = " ".join(os.environ[name] for name in {NAMES})
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(values)
"""
SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], "saved" + os.environ["RANK"]).touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(3600)
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    {how}
time.sleep(3600)
"""


def start(count: int, script: str, *args: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", START, str(count), script, *map(str, args)], env=environment)


def pids_in(folder: Path, count: int) -> list[int]:
    end = time.monotonic() + WAIT_S
    files = [folder / str(rank) for rank in range(count)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def test_processes_find_each_other_as_those_of_torchrun_do(tmp_path) -> None:
    assert start(3, TELLS, tmp_path).wait(WAIT_S) == 0
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    port = found[0][-1]
    assert found == [["3", "3", str(rank), str(rank), "127.0.0.1", port] for rank in range(3)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_processes_save_when_they_are_stopped(tmp_path, number) -> None:
    process = start(2, SAVES, tmp_path)
    pids_in(tmp_path, 2)
    process.send_signal(number)
    assert process.wait(WAIT_S) == 130 and (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


@pytest.mark.parametrize(("how", "code"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 137)])
def test_the_code_is_that_of_the_process_that_failed_and_the_others_end(how, code) -> None:
    assert start(2, FAILS.format(how=how)).wait(WAIT_S) == code


def test_processes_end_when_their_parent_is_killed(tmp_path) -> None:
    process = start(2, SAVES, tmp_path)
    children = [psutil.Process(pid) for pid in pids_in(tmp_path, 2)]
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=20)[1]


@pytest.mark.parametrize(
    ("keys", "gpus", "wanted"),
    [
        ({}, 0, 1),
        ({}, 8, 8),
        ({"train_processes": 2}, 8, 2),
        ({"train_processes": 2}, 0, 2),
        ({"train_processes": 1}, 8, 1),
    ],
)
def test_a_job_trains_in_one_process_per_gpu(recipe, tmp_path, monkeypatch, keys, gpus, wanted) -> None:
    called: dict[str, tuple[list[str], str | None]] = {}

    class Noted(PretendedStages):
        def _call(self, args, name, log, watch, module=None) -> None:
            called[name] = list(args), module
            super()._call(args if module is None else ["train", *args[1:]], name, log, watch)

    Noted(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    job, target = read_job(recipe).model_copy(update=keys), tmp_path / "target"
    runner.run_job(job, target, tmp_path / "out", Console(stderr=True, quiet=True))
    args, module = called.pop("train head")
    assert (module, args[0]) == ((MODULE, str(wanted)) if wanted > 1 else (None, "train"))
    assert args[1].endswith("head.yaml") and {found for _, found in called.values()} == {None}
    # Their number is no part of what was done: on another machine the job goes on.
    called.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    runner.run_job(job, target, tmp_path / "out", Console(stderr=True, quiet=True))
    assert not called


def test_more_processes_than_gpus_are_refused(recipe, tmp_path, monkeypatch) -> None:
    PretendedStages(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job = read_job(recipe).model_copy(update={"train_processes": 3})
    with pytest.raises(JobError, match="train_processes is 3, and torch sees 2 GPUs"):
        runner.run_job(job, tmp_path / "target", tmp_path / "out", Console(stderr=True, quiet=True))


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tiny_target, tmp_path) -> None:
    store = extract_features(write_rows(tmp_path / "rows.jsonl", 24), tiny_target, tmp_path / "store")
    values = recipe(tiny_target, store, batch_tokens=120)
    run_training(tmp_path, "one", values)
    file, out = write_recipe(tmp_path / "two.yaml", values), tmp_path / "two"
    command = [sys.executable, "-m", MODULE, "2", str(file), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (out / "head" / "model.safetensors").exists()
    assert distance(newest(out), newest(tmp_path / "one")) < 2e-5
