"""A writer outlives what an engine does to its descendants, and not its server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import eagle_plugin
from eagle_plugin.learning.data.traffic.segments import segments_of
from eagle_plugin.traffic import writer_process
from eagle_plugin.traffic.detached import ServerProcess
from eagle_plugin.traffic.frames import Exchange
from eagle_plugin.traffic.recorder import Recorder
from eagle_plugin.traffic.settings import CaptureError, CaptureSettings

READY = json.dumps({"version": eagle_plugin.__version__})
WRITER = f"""
import os, sys, time
from pathlib import Path
from eagle_plugin.traffic import writer_process
from eagle_plugin.traffic.detached import ServerProcess, detach
from eagle_plugin.traffic.frames import read_frame
leave, server = detach(), ServerProcess()
folder = Path(os.environ["TEST_FOLDER"])
(folder / "pid").write_text(str(os.getpid()))
leave()
print('{READY}', flush=True)
(folder / "started").touch()
count = 0
while (frame := read_frame(sys.stdin.buffer)) is not None:
    count += 1
    time.sleep(0.01)
(folder / "count").write_text(str(count))
while not server.is_gone:
    time.sleep(0.05)
(folder / "end").touch()
"""
# A server that is killed.
SERVER = f"""
import os, sys, time
from eagle_plugin.traffic.frames import Exchange
from eagle_plugin.traffic.recorder import Recorder
from eagle_plugin.traffic.settings import CaptureSettings
recorder = Recorder(CaptureSettings(os.environ["TEST_FOLDER"]), command=[sys.executable, "-c", {WRITER!r}])
print("up", flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_an_engine_kills_with_its_descendants_is_not_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    recorder = Recorder(CaptureSettings(str(tmp_path)), command=[sys.executable, "-c", WRITER])
    writer = int((tmp_path / "pid").read_text())
    assert writer not in [child.pid for child in psutil.Process().children(recursive=True)]
    for _ in range(50):
        recorder.offer(Exchange(1.0, b"{}", b"x"))
    recorder.close(60)
    wait_for((tmp_path / "count").exists)
    assert int((tmp_path / "count").read_text()) >= 50
    os.kill(writer, signal.SIGKILL)


def test_the_writer_ends_with_a_killed_server(tmp_path: Path) -> None:
    environment = {**os.environ, "TEST_FOLDER": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        writer = psutil.Process(int((tmp_path / "pid").read_text()))
        assert not ServerProcess(server.pid).is_gone
        server.kill()
    wait_for((tmp_path / "end").exists)
    writer.wait(120)
    assert ServerProcess(server.pid).is_gone


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_server_that_ends_is_noticed(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen(["sleep", "600"]) as process:
        server = ServerProcess(process.pid)
        assert not server.is_gone
        process.kill()
    assert server.is_gone and ServerProcess(process.pid).is_gone


def test_the_real_writer_is_detached_and_tells_why_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "START_SECONDS", 600.0)  # a busy machine
    recorder = Recorder(CaptureSettings(str(tmp_path / "capture"), python=sys.executable))
    below = psutil.Process().children(recursive=True)
    assert not any("traffic.writer" in " ".join(child.cmdline()) for child in below)
    recorder.offer(Exchange(1.0, b'{"prompt": "A"}', b'{"choices": [{"text": "B", "finish_reason": "stop"}]}'))
    recorder.close(300)
    assert recorder.totals()["records"] == 1 and len(segments_of(tmp_path / "capture")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="file cannot be written"):
        Recorder(CaptureSettings(str(tmp_path / "file"), python=sys.executable))
