"""One stage as a process: its log, its end, a request to stop, and the end of the job that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from job_worlds import write_recipe
from rich.console import Console

from eagle_plugin.learning.jobs import runner, stage_process
from eagle_plugin.learning.jobs.recipe import JobError, read_job
from eagle_plugin.learning.jobs.watch import Watch

SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, watch: Watch | None = None) -> Path:
    """Call a script as a stage; returns its log."""
    monkeypatch.setattr(stage_process, "COMMAND", (sys.executable, "-c", script))
    log = folder / "logs" / "01-stage.log"
    stage_process.call([str(folder / "pid")], "stage", log, watch or Watch())
    return log


def pid_in(folder: Path) -> int:
    end = time.monotonic() + 20
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    return int((folder / "pid").read_text())


def test_the_output_of_a_stage_is_shown_and_logged(monkeypatch, tmp_path, capfd) -> None:
    script = "import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr)"
    assert run(monkeypatch, tmp_path, script).read_text() == "to stdout\nto stderr\n"
    assert capfd.readouterr().err == "to stdout\nto stderr\n"


def test_a_stage_that_fails_ends_the_job(monkeypatch, tmp_path) -> None:
    with pytest.raises(JobError, match="the stage 'stage' ended with exit code 2"):
        run(monkeypatch, tmp_path, "import sys; sys.exit(2)")


def test_a_stage_that_the_system_killed_is_told_from_one_that_failed(monkeypatch, tmp_path) -> None:
    with pytest.raises(stage_process.StageKilled, match=r"memory runs out: .* GiB were free when it began") as killed:
        run(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert killed.value.wanted > 0


KILLED_ONCE = """
import os, pathlib, sys
first = pathlib.Path(sys.argv[sys.argv.index("--out") + 1] + ".tried")
if not first.exists():
    first.touch()
    os.kill(os.getpid(), 9)
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).touch()
"""


@pytest.mark.parametrize("comes", [True, False])
def test_a_killed_stage_waits_for_memory_and_runs_once_more(monkeypatch, tmp_path, tiny_target, capfd, comes) -> None:
    free = [10, 10, 1000 if comes else 10]  # while the stage waits that had 1,000 when it began
    monkeypatch.setattr(stage_process, "COMMAND", (sys.executable, "-c", KILLED_ONCE))
    monkeypatch.setattr(stage_process, "available_bytes", lambda: 1000)
    monkeypatch.setattr(runner, "available_bytes", lambda: free.pop(0) if len(free) > 1 else free[0])
    monkeypatch.setattr(runner, "MEMORY_S", 60.0 if comes else 0.0)
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: None)
    recipe = read_job(write_recipe(tmp_path, tiny_target))
    job = partial(runner.run_job, recipe, tiny_target, tmp_path / "out", Console(stderr=True), until="prompts")
    if comes:
        job()
        assert (tmp_path / "out" / "prompts.jsonl").exists()
    else:
        with pytest.raises(stage_process.StageKilled, match="the stage 'prompts' was killed"):
            job()
    assert capfd.readouterr().err.count("the stage runs once more") == 1


def test_a_log_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(JobError, match="cannot write .*01-stage.log"):
        run(monkeypatch, tmp_path, "")


def test_a_request_to_stop_lets_the_stage_save(monkeypatch, tmp_path) -> None:
    watch = Watch()
    thread = threading.Thread(target=lambda: (pid_in(tmp_path), watch.request_stop()))
    thread.start()
    with pytest.raises(stage_process.StopRequested):
        run(monkeypatch, tmp_path, SAVES, watch)
    thread.join()
    assert (tmp_path / "logs" / "01-stage.log").read_text() == "saved\n"


def test_ctrl_c_lets_the_stage_save(monkeypatch, tmp_path) -> None:
    thread = threading.Thread(target=lambda: (pid_in(tmp_path), os.kill(os.getpid(), signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, tmp_path, SAVES)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert (tmp_path / "logs" / "01-stage.log").read_text() == "saved\n"


def test_a_stage_ends_when_its_job_is_killed(monkeypatch, tmp_path) -> None:
    process = multiprocessing.get_context("fork").Process(target=run, args=(monkeypatch, tmp_path, SAVES))
    process.start()
    stage = psutil.Process(pid_in(tmp_path))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not psutil.wait_procs([stage], timeout=20)[1]
