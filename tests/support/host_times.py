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
    document, output = _document(engine, folder, "--rounds", "5", "--greedy", "1", "8", "--sampled", "8")
    assert "Aims for greedy 8: worker 1000 us, found " in output
    assert document["engine"] == engine and document["versions"][engine]
    return document


def policy_times(engine: str, folder: Path) -> dict[str, Any]:
    """What each policy takes for eight requests."""
    document, output = _document(engine, folder, "--policies", "auto", "fixed", "--rounds", "32", "--greedy", "8")
    assert "Aim: auto at most 1.03 of fixed." in output and document["engines"].keys() == {engine}
    one = document["engines"][engine]["scenarios"]["greedy 8"]
    assert one["of_fixed"].keys() == {"auto"}
    for host in one["policies"].values():
        assert (
            host["host_us"]["median"] > 0
            and host["rounds_by_shape"]
            and all(x["median"] for x in host["phases_us"].values())
        )
    found: dict[str, Any] = one["policies"]
    return found


def _document(engine: str, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What the command writes, and what it prints."""
    file = folder / "host-time.json"
    command = [sys.executable, str(ROOT / "benchmarks/host_time.py"), "--engine", engine, "--repeats", "1", *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    command += ["--json", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(file.read_text())
    return document, done.stdout


def check_times(report: dict[str, Any]) -> None:
    """Times are only checked to be there, and to fit each other."""
    for one in report["scenarios"].values():
        for cost in (one["eager"], one["captured"]):
            assert all(phase["median"] > 0 for phase in cost["phases_us"].values())
            assert cost["worker_us"]["median"] > max(phase["median"] for phase in cost["phases_us"].values())
