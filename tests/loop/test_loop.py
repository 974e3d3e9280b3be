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
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--count", "12", "--held-out", "4", "--answer-tokens", "16", "--traffic-concurrency", "4", "--epochs", "1",
    "--eval-tokens", "16", "--concurrency", "1", "2", "--repeats", "1", "--bench-tokens", "8", "--swap-clients", "2",
    "--swap-questions", "3", "--swap-tokens", "12",
]  # fmt: skip
RECORDED = ("prompts.jsonl", "held-out.jsonl", "held-out-rows.jsonl", "capture", "traffic.json")
# Stages, and in how many seconds each is done on a quiet machine: a kill comes within that time.
STEPS = {"traffic": 30, "export": 2, "prepare": 5, "rows": 4, "features of recorded rows": 10, "train head": 15,
         "accept length": 15, "benchmark": 60, "report": 4, "exchange": 40}  # fmt: skip


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

    def kill_in(self, step: str, delay_s: float) -> bool:
        """Kill it and all that it started, so long after the step began or was passed; False if it ended before."""
        while (
            f" {step}\n" not in self.text and f" {step}: done before" not in self.text and self.process.poll() is None
        ):
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
    killed = []
    for step, seconds in STEPS.items():
        if step == "export":  # what is recorded is complete, or becomes so now
            while not (out / "loop/traffic.json").exists():
                Run(out).kill_in("export", 0.0)
            (other / "loop").mkdir(parents=True)
            for name in RECORDED:
                source = out / "loop" / name
                (shutil.copytree if source.is_dir() else shutil.copy2)(source, other / "loop" / name)
        if Run(out).kill_in(step, rng.uniform(0, seconds)):
            killed.append(step)
    print("killed in", killed)
    assert len(killed) >= 6, killed
    found, wanted = finish(out), finish(other)

    prompts = found["prompts"]
    assert prompts == wanted["prompts"] and prompts["asked"] == prompts["recorded"] == 12 and prompts["held_out"] == 4
    assert 8 <= prompts["trained_on"] <= 12
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
    questions = {json.loads(line)["messages"][0]["content"] for line in (out / "loop/held-out.jsonl").open()}
    captured = "".join(path.read_text() for path in (out / "loop/capture").glob("*.jsonl"))
    assert not any(json.dumps(one)[1:-1] in captured for one in questions)  # never seen by a server that records
