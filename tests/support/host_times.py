"""Runs benchmarks/host_time.py with few rounds, in a process of its own: an engine's state belongs to a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def host_times(engine: str, folder: Path) -> dict[str, Any]:
    """The report of the smallest set of batches."""
    file = folder / "host-time.json"
    options = ["--repeats", "1", "--rounds", "5", "--greedy", "1", "8", "--sampled", "8", "--json", str(file)]
    command = [sys.executable, str(ROOT / "benchmarks/host_time.py"), "--engine", engine, *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Aims for greedy 8: worker 1000 us, found " in done.stdout
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["engine"] == engine and document["versions"][engine] and document["assumptions"]
    return document


def check_times(report: dict[str, Any]) -> None:
    """Times are only checked to be there, and to fit each other."""
    for one in report["scenarios"].values():
        for cost in (one["eager"], one["captured"]):
            assert all(phase["median"] > 0 for phase in cost["phases_us"].values())
            assert cost["worker_us"]["median"] > max(phase["median"] for phase in cost["phases_us"].values())
        for plain, overlapped in one["simulated"].values():
            assert not plain["overlap"] and overlapped["overlap"]
            assert overlapped["round_us"] < plain["round_us"]
            assert plain["hidden_share"] < overlapped["hidden_share"] <= 1
