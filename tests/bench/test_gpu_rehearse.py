"""The rehearsal of a GPU run, benchmarks/gpu/rehearse.py: its parts, and all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import rehearse
from benchmarks.gpu.steps import STEPS, Step
from eagle_plugin.common.command_end import end_of

CONNECTS = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
    print("loopback")
try:
    socket.create_connection(("192.0.2.1", 80), 5)
except OSError as error:
    print(error.errno)
"""


@pytest.mark.matrix
@pytest.mark.timeout(5400)
def test_a_rehearsal(capfd: pytest.CaptureFixture[str]) -> None:
    """Archives, another Python, no network, every step in its tiny form. Minutes to an hour, and downloads."""
    assert end_of(lambda: rehearse.main([]), owns_process=False) == 0
    out = capfd.readouterr().out
    for step in STEPS:
        how = "skipped, it needs a GPU" if step.name in rehearse.NEEDS_GPU else "complete, "
        assert f"{step.name}: {how}" in out, step.name


def test_there_is_a_loopback_and_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    command = rehearse.offline()
    if not command:
        assert "the network is not cut off" in capsys.readouterr().err
        return
    done = subprocess.run([*command, sys.executable, "-c", CONNECTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["loopback", "101"], "wanted ENETUNREACH"


def test_another_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert rehearse.find_python() == Path(sys.executable)
    assert "no Python 3.12 was found, this one is used: " in capsys.readouterr().err
    # A shim that says that the version is not chosen is not one.
    for place, text in (("bin/python3.12", "exit 127"), ("pyenv/versions/3.12.1/bin/python", "echo Python 3.12.1")):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / place).chmod(0o755)
    assert rehearse.find_python() == tmp_path / "pyenv/versions/3.12.1/bin/python"


def test_what_is_not_complete_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "carried/results"
    folder.mkdir(parents=True)
    (folder / "build.json").write_text(json.dumps({"seconds": 2.0}))
    (folder / "round.json").write_text(json.dumps({"seconds": 2.0, "unfinished": "the limit"}))
    steps = [Step(name, name, "", 1, 1) for name in ("build", "round", "graphs", "sanitizers")]
    assert rehearse.report(tmp_path, steps) == (
        [
            "build: complete, 2 s",
            "round: not complete (the limit)",
            "graphs: not complete (no result)",
            "sanitizers: skipped, it needs a GPU",
        ],
        ["round", "graphs"],
    )
