"""How many launches and how much host time a decode round of the worker takes, by benchmarks/host_time.py.

On a GPU every torch operation and native kernel of a round is a launch, and launches are what a small batch waits for.
The counts are exact, so a change that adds a launch fails here; times are only checked to be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Per round, outside of the models' forwards. The aim is 30 before capture (benchmarks/host_time.py).
GREEDY_LAUNCHES = 51
SAMPLED_LAUNCHES = 81

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Few rounds of the smallest set of batches, in a process of its own: SGLang's state belongs to a process."""
    file = tmp_path_factory.mktemp("host-time") / "host-time.json"
    options = ["--repeats", "1", "--rounds", "5", "--greedy", "1", "8", "--sampled", "8", "--json", str(file)]
    command = [sys.executable, str(ROOT / "benchmarks/host_time.py"), *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Aim for greedy 8: at most 1000 us, found " in done.stdout
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_launches(report: dict[str, Any]) -> None:
    found = {name: one["launches"] for name, one in report["scenarios"].items()}
    assert found["greedy 1"] == found["greedy 8"], "the number of launches depends on the batch"
    assert found["greedy 8"] <= GREEDY_LAUNCHES, report["scenarios"]["greedy 8"]["launches_by_name"]
    assert found["sampled 8"] <= SAMPLED_LAUNCHES, report["scenarios"]["sampled 8"]["launches_by_name"]


def test_the_kernels_of_a_round_are_counted(report: dict[str, Any]) -> None:
    """A control: counts that miss the native kernels would be small for the wrong reason."""
    names = report["scenarios"]["sampled 8"]["launches_by_name"]
    assert {"native grow_level", "native select_tree", "native verify_tree", "native compact_kv"} <= names.keys()


def test_times(report: dict[str, Any]) -> None:
    for one in report["scenarios"].values():
        assert all(phase["median"] > 0 for phase in one["phases_us"].values())
        parts = sum(phase["median"] for name, phase in one["phases_us"].items() if name != "target's runner")
        assert one["worker_us"]["median"] == pytest.approx(parts, rel=0.3)
        for lines in one["simulated"].values():
            plain, overlapped = lines
            assert not plain["overlap"] and overlapped["overlap"]
            assert overlapped["round_us"] < plain["round_us"]
            assert plain["hidden_share"] < overlapped["hidden_share"] <= 1
    assert report["assumptions"] and report["versions"]["sglang"]
