"""The whole loop on the real model in a small form: killed in every step, and compared with one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eagle_plugin.learning.data.rows import read_rows
from eagle_plugin.learning.data.store.feature_store import FeatureStore

ROOT = Path(__file__).parents[2]
SMALL = [
    "--count", "12", "--held-out", "4", "--answer-tokens", "16", "--traffic-concurrency", "4", "--epochs", "1",
    "--eval-tokens", "16", "--concurrency", "1", "2", "--repeats", "1", "--bench-tokens", "8", "--swap-clients", "2",
    "--swap-questions", "3", "--swap-tokens", "12",
]  # fmt: skip
RECORDED = ("prompts.jsonl", "held-out.jsonl", "held-out-rows.jsonl", "recorded.jsonl", "features")
# Stages, and in how many seconds each is done on a quiet machine: a kill comes within that time.
STEPS = {"traffic": 30, "train head": 15, "accept length": 15, "benchmark": 60, "report": 4, "exchange": 40}


class Run:
    """A loop in a process group of its own."""

    def __init__(self, out: Path) -> None:
        command = [sys.executable, str(ROOT / "benchmarks/loop.py"), "--out", str(out), *SMALL]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.log = out / "run.log"
        out.mkdir(exist_ok=True)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def kill_in(self, step: str, delay_s: float, reached: Callable[[], bool] = lambda: True) -> bool:
        """Kill it and all that it started, so long after the step began or was passed; False if it ended before.

        reached: what must hold as well.
        """
        begun = f" {step}\n", f" {step}: done before"
        while not (any(one in self.text for one in begun) and reached()) and self.process.poll() is None:
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(delay_s)
        if self.process.poll() is not None:
            return False
        family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        self.process.wait()
        return True


def finish(out: Path) -> dict:
    """Run it to its end; what loop.json has."""
    run = Run(out)
    assert run.process.wait() in (0, 1), run.text  # 1: so little training need not reach the wanted gain
    found = json.loads((out / "loop.json").read_text())
    assert (run.process.returncode == 0) == (found["gain"] >= found["wanted_gain"])
    return found


def pages_text(out: Path) -> str:
    """The report without measured times, which are never the same, and without the hints that depend on the machine."""
    text = re.sub(r"## Read this with care.*?(?=^## )", "", (out / "report.md").read_text(), flags=re.DOTALL | re.M)
    before, ratios, after = text.partition("## Ratios")
    return re.sub(r"[0-9][0-9.,]*", "#", before) + re.sub(r"[0-9]+\.[0-9]+|20[0-9-]+T[0-9:+]+", "#", ratios + after)


@pytest.mark.server
@pytest.mark.matrix
def test_killed_in_every_step_it_ends_with_the_same_head_and_report(tmp_path: Path) -> None:
    """The same for the same recorded answers: bfloat16 answers depend on what was answered beside them."""
    out, other, rng = tmp_path / "killed", tmp_path / "other", random.Random(time.time_ns())
    rows, killed = out / "loop/recorded.jsonl", []
    assert Run(out).kill_in("traffic", 0.0, lambda: rows.is_file() and rows.stat().st_size > 0)
    first = rows.read_bytes().rpartition(b"\n")[0]
    for step, seconds in STEPS.items():
        if step == "train head":  # what is recorded becomes complete now
            assert Run(out).kill_in(step, 0.0)
            (other / "loop").mkdir(parents=True)
            for name in RECORDED:
                source = out / "loop" / name
                (shutil.copytree if source.is_dir() else shutil.copy2)(source, other / "loop" / name)
        if Run(out).kill_in(step, rng.uniform(0, seconds)):
            killed.append(step)
    print("killed in", killed)
    assert len(killed) >= 4, killed
    assert rows.read_bytes().startswith(first), "an answer that was there was asked for again"
    found, wanted = finish(out), finish(other)

    prompts = found["prompts"]
    assert prompts == wanted["prompts"] and prompts["asked"] == prompts["recorded"] == 12 and prompts["held_out"] == 4
    recorded = {row.id: row.prompt_ids for row in read_rows(rows)}
    assert {entry.id for entry in FeatureStore(out / "loop/features/recorded").entries} == recorded.keys()
    heads = [(folder / "loop/head/model.safetensors").read_bytes() for folder in (out, other)]
    assert heads[0] == heads[1]
    assert found["accept_lengths"] == wanted["accept_lengths"] and found["accept_length_after"] > 1
    assert pages_text(out) == pages_text(other)
    for one in (found, wanted):
        assert one["swap"]["failed"] == one["swap"]["responses_changed"] == 0
        assert one["swap"]["during"] >= 1 and one["swap"]["after"] >= 3
        states = {(row["state"], row["concurrency"]) for row in one["states"]}
        assert states == {(state, clients) for state in ("none", "base", "trained") for clients in (1, 2)}
    assert "<html" in (out / "report.html").read_text()
    assert not any(row.prompt_ids in recorded.values() for row in read_rows(out / "loop/held-out-rows.jsonl"))
