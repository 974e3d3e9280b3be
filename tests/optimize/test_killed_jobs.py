"""A real job, killed in every stage and resumed, ends with the head of a job that nobody killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from job_worlds import RUN, STAGES, write_recipe
from token_endpoint import TokenEndpoint

from eagle_plugin.cli import main

TRAIN = RUN | {"budget": {"updates": 60}, "checkpoint_every": 5, "threads": 1, "dtype": "float32", "device": "cpu"}


def start(action: str, name: str, jobs: Path, *options: str) -> subprocess.Popen[bytes]:
    """The command as a user starts it, in a process group of its own."""
    args = [sys.executable, "-m", "eagle_plugin.cli", "optimize", action, name, "--jobs", str(jobs), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # A shell starts background jobs, such as a test run, with SIGINT ignored, and children inherit that.
    return subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                            start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


def stage_of(jobs: Path, name: str) -> str:
    try:
        return json.loads((jobs / f"{name}.status.json").read_text())["stage"]
    except FileNotFoundError:
        return ""


def kill_in(stage: str, process: subprocess.Popen[bytes], jobs: Path, name: str, delay_s: float) -> bool:
    """Kill the job and its stage `delay_s` after the stage began; False if the job ended before."""
    try:
        while STAGES.index(stage_of(jobs, name) or STAGES[0]) < STAGES.index(stage) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(delay_s)
        return process.poll() is None
    finally:
        if process.poll() is None:
            # The stages first: without the job they would be asked to end, which is gentler than a power cut.
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()


@pytest.mark.matrix
def test_killed_in_every_stage_it_ends_with_the_same_head(tmp_path: Path, tiny_target: Path) -> None:
    rng, jobs = random.Random(time.time_ns()), tmp_path / "jobs"
    with TokenEndpoint(delay_s=0.1) as server:
        ask = {"max_tokens": 24, "concurrency": 1, "temperatures": [0.0], "endpoints": [server.url]}
        recipe = str(write_recipe(tmp_path / "recipe", tiny_target, generate=ask, train={"head": TRAIN}))
        assert main(["optimize", "create", "killed", "--jobs", str(jobs), "--recipe", recipe, "--no-start"]) == 0
        killed = []
        for stage in STAGES:
            delay = rng.uniform(0, 5)
            if kill_in(stage, start("resume", "killed", jobs), jobs, "killed", delay):
                killed.append((stage_of(jobs, "killed"), round(delay, 2)))
        print("killed in", killed)
        assert len(killed) >= 3, killed
        assert start("resume", "killed", jobs).wait() == 0
        assert start("create", "whole", jobs, "--recipe", recipe).wait() == 0
        other = "train.head.seed=1"
        share = f"data={jobs / 'whole'}"
        assert start("create", "other", jobs, "--recipe", recipe, "--set", other, "--set", share).wait() == 0
    heads = {name: (jobs / name / "head" / "model.safetensors").read_bytes() for name in ("killed", "whole", "other")}
    assert heads["killed"] == heads["whole"], killed
    assert heads["other"] != heads["whole"]  # so equal bytes mean something
    lineages = [json.loads((jobs / f"{name}.lineage.json").read_text()) for name in ("killed", "whole")]
    for stage in ("prompts", "answers of the target", "vocabulary"):
        assert lineages[0]["stages"][stage]["sha256"] == lineages[1]["stages"][stage]["sha256"], stage


def ask_to_stop(jobs: Path, process: subprocess.Popen[bytes]) -> None:
    assert main(["optimize", "stop", "one", "--jobs", str(jobs)]) == 0


def press_ctrl_c(jobs: Path, process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does


@pytest.mark.matrix
@pytest.mark.parametrize("how", [ask_to_stop, press_ctrl_c])
def test_a_real_training_that_is_stopped_finishes_its_update(tmp_path: Path, tiny_target: Path, how) -> None:
    jobs = tmp_path / "jobs"
    with TokenEndpoint() as server:
        ask = {"max_tokens": 24, "concurrency": 1, "temperatures": [0.0], "endpoints": [server.url]}
        endless = TRAIN | {"budget": {"minutes": 30}, "checkpoint_every": 100_000}
        recipe = str(write_recipe(tmp_path / "recipe", tiny_target, generate=ask, train={"head": endless}))
        process = start("create", "one", jobs, "--recipe", recipe)
        try:
            log = jobs / "one/train/head/logs/train.csv"
            while not log.exists() or log.read_text().count("\n") < 3:  # it trains, and handles signals
                assert process.poll() is None, "ended before its training"
                time.sleep(0.05)
            how(jobs, process)
            assert process.wait(timeout=60) == 130
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert json.loads((jobs / "one.status.json").read_text())["state"] == "stopped"
    assert len(list((jobs / "one/train/head/checkpoints").glob("update-*"))) == 1
    assert "stopped after update" in (jobs / "one/logs/05-train-head.log").read_text()
