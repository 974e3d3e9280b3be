"""The whole loop on the real model in a small form: killed once, continued, and with every file in the end."""

from __future__ import annotations

import json
import os
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


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "benchmarks/loop.py"), "--out", str(out), *SMALL]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.server
@pytest.mark.matrix
def test_the_loop_is_killed_continues_and_writes_its_results(tmp_path: Path) -> None:
    first = start(tmp_path)
    while first.poll() is None and not (tmp_path / "loop/rows.jsonl").exists():
        time.sleep(0.1)
    assert first.poll() is None, first.communicate()[0]
    for process in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
        process.send_signal(signal.SIGKILL)
    first.communicate()
    again = start(tmp_path)
    text, _ = again.communicate()
    assert again.returncode in (0, 1), text  # 1: so little training need not reach the wanted gain
    for step in ("prompts", "traffic", "export", "prepare", "rows"):
        assert f" {step}: done before" in text, text
    found = json.loads((tmp_path / "loop.json").read_text())
    assert found["accept_length_before"] > 1 and found["accept_length_after"] > 1
    assert (again.returncode == 0) == (found["gain"] >= found["wanted_gain"])
    assert found["swap"]["failed"] == found["swap"]["responses_changed"] == 0
    assert found["swap"]["during"] >= 1 and found["swap"]["after"] >= 3
    prompts = found["prompts"]
    assert prompts["asked"] == prompts["recorded"] == 12 and prompts["held_out"] == 4
    assert 8 <= prompts["trained_on"] <= 12
    assert {(row["state"], row["concurrency"]) for row in found["states"]} == {
        (state, clients) for state in ("none", "base", "trained") for clients in (1, 2)
    }
    assert "<html" in (tmp_path / "report.html").read_text()
    questions = {json.loads(line)["messages"][0]["content"] for line in (tmp_path / "loop/held-out.jsonl").open()}
    captured = "".join(path.read_text() for path in (tmp_path / "loop/capture").glob("*.jsonl"))
    assert not any(json.dumps(one)[1:-1] in captured for one in questions)  # never seen by a server that records
