"""Jobs in a folder: created, run, listed, described, stopped and resumed; who may run what."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from job_worlds import STAGES, PretendedStages
from object_server import s3_bucket

from eagle_plugin.cli import main
from eagle_plugin.common.errors import UserError
from eagle_plugin.common.progress import VARIABLE, report_progress
from eagle_plugin.learning import Job
from eagle_plugin.learning.data.store import objects
from eagle_plugin.learning.jobs import job_watch, jobs_folder
from eagle_plugin.learning.jobs.jobs_folder import JobsFolder, Status
from eagle_plugin.learning.jobs.lineage import Lineage
from eagle_plugin.learning.jobs.recipe import read_job
from eagle_plugin.learning.jobs.stage import Stage


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one sentence of a command that is refused."""
    capsys.readouterr()
    assert main(["optimize", *map(str, args)]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("error: ") == 1
    return err[err.index("error: ") :]


def described(capsys: pytest.CaptureFixture[str], name: str, jobs: Path | str) -> dict:
    capsys.readouterr()
    assert main(["optimize", "describe", name, "--jobs", str(jobs), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_job_is_created_run_listed_and_described(recipe, stages, tmp_path, capsys) -> None:
    jobs = tmp_path / "jobs"
    create = ["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe)]
    assert main([*create, "--no-start"]) == 0 and stages.ran == []
    assert described(capsys, "one", jobs)["shown"] == "created"
    assert main(["optimize", "resume", "one", "--jobs", f"file://{jobs}"]) == 0
    assert stages.ran == list(STAGES)
    status = described(capsys, "one", jobs)
    assert status["shown"] == "finished" and [one["name"] for one in status["times"]] == list(STAGES)
    assert main(["optimize", "list", "--jobs", str(jobs)]) == 0
    assert "one  finished     5/5 train head" in capsys.readouterr().out
    assert main(["optimize", "describe", "one", "--jobs", str(jobs)]) == 0
    assert "state         finished" in capsys.readouterr().out
    assert (jobs / "one" / "head" / "model.safetensors").exists()
    assert "exists" not in refused(capsys, *create[1:]) and stages.ran == list(STAGES)


def test_the_lineage_names_all_digests(recipe, stages, tmp_path) -> None:
    jobs = tmp_path / "jobs"
    assert main(["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe)]) == 0
    lineage = json.loads((jobs / "one.lineage.json").read_text())
    assert set(lineage["stages"]) == set(STAGES)
    assert all(one["sha256"] for one in lineage["stages"].values())
    assert len(lineage["target"]["weights_sha256"]) == 64 and len(lineage["recipe_sha256"]) == 64
    assert lineage["code"]["eagle_plugin"] and lineage["parents"] == {}


def test_the_seconds_of_a_stage_count_its_interrupted_runs(recipe, tmp_path) -> None:
    output = tmp_path / "made"
    output.write_text("x")
    stage = Stage("train head", [], output)

    def seconds_after(digest: str, interrupted: float = 0.0, done: float | None = None) -> float:
        lineage = Lineage(tmp_path / "lineage.json", read_job(recipe), tmp_path / "target", tmp_path, tmp_path)
        if done is None:
            lineage.add_interrupted(stage, digest, interrupted)
        else:
            lineage.add(stage, digest, done)
        return json.loads((tmp_path / "lineage.json").read_text())["stages"]["train head"]["seconds"]

    assert [seconds_after("a", 5.0), seconds_after("a", 2.0), seconds_after("a", done=7.0)] == [5.0, 7.0, 14.0]
    assert seconds_after("a", done=0.0) == 14.0  # done before
    assert [seconds_after("b", 3.0), seconds_after("c", done=4.0)] == [3.0, 4.0]  # of other settings


def test_stop_ends_a_job_after_its_step_and_resume_continues(recipe, stages, tmp_path, capsys, monkeypatch) -> None:
    jobs = tmp_path / "jobs"
    monkeypatch.setattr(job_watch, "BEAT_S", 0.02)

    def stop(name, watch) -> None:
        if name == "vocabulary" and stages.ran.count(name) == 1:
            assert main(["optimize", "stop", "one", "--jobs", str(jobs)]) == 0
            end = time.monotonic() + 10
            while not watch.stops():
                assert time.monotonic() < end
                time.sleep(0.01)

    stages.during = stop
    assert main(["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe)]) == 130
    status = described(capsys, "one", jobs)
    assert status["shown"] == "stopped" and status["message"] == "on request" and status["stage"] == "vocabulary"
    assert "not running, it is stopped" in refused(capsys, "stop", "one", "--jobs", jobs)
    assert main(["optimize", "resume", "one", "--jobs", str(jobs)]) == 0
    assert stages.ran == [*STAGES[:3], *STAGES[2:]]


def test_the_time_limit_counts_all_runs(recipe, stages, tmp_path, capsys) -> None:
    jobs = tmp_path / "jobs"
    stages.during = lambda name, watch: time.sleep(0.05 if name == "prompts" else 0)
    limit = ["--set", "limit_minutes=0.0005"]
    assert main(["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe), *limit]) == 130
    assert "time limit of 0.0005 minutes is over" in described(capsys, "one", jobs)["message"]
    assert main(["optimize", "resume", "one", "--jobs", str(jobs)]) == 130
    assert main(["optimize", "resume", "one", "--jobs", str(jobs), "--set", "limit_minutes=5"]) == 0


def test_progress_has_a_rate_and_the_time_left(recipe, stages, tmp_path, capsys, monkeypatch) -> None:
    jobs, seen = tmp_path / "jobs", []

    def work(name, watch) -> None:
        if name == "vocabulary":
            monkeypatch.setenv(VARIABLE, str(watch.progress_file))
            for done in (10, 30):
                monkeypatch.setattr("eagle_plugin.common.progress._last", -1.0)
                report_progress(done, 100, "tokens")
                watch.measure()
                time.sleep(0.05)
            watch._write()
            seen.append(described(capsys, "one", jobs))

    stages.during = work
    assert main(["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe)]) == 0
    assert seen[0]["shown"] == "running" and (seen[0]["done"], seen[0]["total"]) == (30, 100)
    assert seen[0]["rate"] > 0 and seen[0]["seconds_left"] == pytest.approx(70 / seen[0]["rate"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_job_is_interrupted_and_resumes(recipe, stages, tmp_path, capsys, stage) -> None:
    """A process of its own is killed in the middle of a stage."""
    jobs = tmp_path / "jobs"
    stages.during = lambda name, watch: os.kill(os.getpid(), signal.SIGKILL) if name == stage else None
    args = ["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe)]
    process = multiprocessing.get_context("fork").Process(target=main, args=(args,))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    status = described(capsys, "one", jobs)
    assert status["state"] == "running" and status["shown"] == "interrupted" and status["stage"] == stage
    stages.during = lambda name, watch: None
    assert main(["optimize", "resume", "one", "--jobs", str(jobs)]) == 0
    assert stages.ran == list(STAGES[STAGES.index(stage) :])
    assert described(capsys, "one", jobs)["shown"] == "finished"


def test_a_job_of_another_machine_is_alive_by_its_heartbeat() -> None:
    now = time.time()
    status = Status(state="running", host="another", pid=1, heartbeat=now)
    assert status.shown == "running"
    assert status.model_copy(update={"heartbeat": now - jobs_folder.STALE_S - 1}).shown == "interrupted"


def test_a_job_cannot_run_twice(recipe, stages, tmp_path, capsys) -> None:
    jobs, seen = tmp_path / "jobs", []

    def start_again(name, watch) -> None:
        seen.append(refused(capsys, "resume", "one", "--jobs", jobs))
        seen.append(refused(capsys, "resume", "one", "--jobs", jobs, "--set", "vocabulary=32"))
        seen.append(refused(capsys, recipe, "--out", jobs / "one"))
        stages.during = lambda name, watch: None

    stages.during = start_again
    assert main(["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe)]) == 0
    assert "the job one is running on" in seen[0] and "the job one is running on" in seen[1]
    assert f"{jobs / 'one'} is in use by another running job" in seen[2]
    assert described(capsys, "one", jobs)["shown"] == "finished"


def test_two_jobs_cannot_share_a_data_folder_at_once(recipe, stages, tmp_path, capsys) -> None:
    jobs, seen = tmp_path / "jobs", []
    share = ["--recipe", str(recipe), "--set", f"data={tmp_path / 'data'}"]

    def start_other(name, watch) -> None:
        stages.during = lambda name, watch: None
        seen.append(refused(capsys, "create", "two", "--jobs", jobs, *share))

    stages.during = start_other
    assert main(["optimize", "create", "one", "--jobs", str(jobs), *share]) == 0
    assert f"{tmp_path / 'data'} is in use by another running job" in seen[0] and "--set data=DIR" in seen[0]
    assert described(capsys, "two", jobs)["shown"] == "created"
    assert main(["optimize", "resume", "two", "--jobs", str(jobs)]) == 0  # afterwards it may
    assert stages.ran.count("vocabulary") == 1 and stages.ran.count("train head") == 2


def test_a_full_disk_is_one_sentence_and_keeps_what_is_done(recipe, stages, tmp_path, capsys, monkeypatch) -> None:
    jobs = tmp_path / "jobs"
    args = ("create", "one", "--jobs", jobs, "--recipe", recipe)

    def full(path, *_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def fill(name, watch) -> None:
        if name == "vocabulary":  # neither the stage nor the status can be written
            monkeypatch.setattr(objects, "replace_file", full)
            full("vocabulary.safetensors")

    stages.during = fill
    assert "No space left on device" in refused(capsys, *args)
    monkeypatch.undo()
    monkeypatch.setattr(jobs_folder, "_process_runs", lambda pid: False)
    assert described(capsys, "one", jobs)["shown"] == "interrupted"
    again = PretendedStages(monkeypatch)
    assert main(["optimize", "resume", "one", "--jobs", str(jobs)]) == 0
    assert again.ran == list(STAGES[2:])
    monkeypatch.setattr(objects, "create_file", full)
    assert f"the disk of {jobs} is full" in refused(capsys, "create", "two", *args[2:])
    assert JobsFolder(str(jobs)).names() == ["one"]


def test_an_unknown_job_is_refused(recipe, stages, tmp_path, capsys) -> None:
    jobs = tmp_path / "jobs"
    for action in ("describe", "stop", "resume"):
        assert f"no job 'one' in {jobs}, which holds no job" in refused(capsys, action, "one", "--jobs", jobs)
    assert main(["optimize", "create", "one", "--jobs", str(jobs), "--recipe", str(recipe), "--no-start"]) == 0
    assert "wanted one of one, did you mean one?" in refused(capsys, "describe", "ones", "--jobs", jobs)
    assert "no name of a job" in refused(capsys, "create", "../one", "--jobs", jobs, "--recipe", recipe)
    assert "there is a job one" in refused(capsys, "create", "one", "--jobs", jobs, "--recipe", recipe)
    (jobs / "one.status.json").write_text("nonsense")
    assert "is not the status of a job" in refused(capsys, "describe", "one", "--jobs", jobs)


def test_a_jobs_folder_in_a_bucket(recipe, stages, tmp_path, capsys) -> None:
    with s3_bucket() as bucket:
        jobs = f"{bucket}/jobs"
        create = ("create", "one", "--jobs", jobs, "--recipe", str(recipe))
        assert "add --set out=DIR" in refused(capsys, *create)
        assert main(["optimize", *create, "--set", f"out={tmp_path / 'out'}"]) == 0
        assert described(capsys, "one", jobs)["shown"] == "finished"
        assert JobsFolder(jobs).names() == ["one"] and (tmp_path / "out" / "head").exists()
        JobsFolder(jobs).request_stop("one")
        assert JobsFolder(jobs).stop_requested("one")
        JobsFolder(jobs).forget_stop("one")
        assert not JobsFolder(jobs).stop_requested("one")
    assert "nosuch://" in refused(capsys, "list", "--jobs", "nosuch://place/jobs")


def test_a_job_is_an_object(recipe, stages, tmp_path) -> None:
    jobs = str(tmp_path / "jobs")
    job = Job.create("one", jobs=jobs, recipe=recipe, settings={"generate.max_tokens": 7, "train_minutes": 2.5})
    assert (job.settings.generate.max_tokens, job.settings.train_minutes) == (7, 2.5)
    assert job.describe().shown == "created" and stages.ran == []
    with pytest.raises(UserError, match="the job one is created"):
        job.wait()
    with pytest.raises(UserError, match="not running"):
        job.stop()
    assert job.run().shown == "finished" and stages.ran == list(STAGES)
    assert (job.head / "model.safetensors").exists() and job.wait().state == "finished"
    assert set(job.lineage()["stages"]) == set(STAGES)
    assert {name: status.shown for name, status in Job.list(jobs).items()} == {"one": "finished"}
    again = Job("one", jobs)
    again.change(["generate.max_tokens=9"])
    assert again.settings.generate.max_tokens == 9
    for wrong in ({"name": "two"}, {"name": "two", "recipe": recipe, "target": "x"}):
        with pytest.raises(UserError):
            Job.create(**wrong, jobs=jobs)
    with pytest.raises(UserError, match="there is no job 'tow'"):
        Job("tow", jobs)


def test_a_job_runs_in_a_process_of_its_own(recipe, tmp_path) -> None:
    """Its endpoint does not answer, which the program that waits hears in the words of the stage."""
    job = Job.create("one", jobs=str(tmp_path / "jobs"), recipe=recipe)
    job.start()
    with pytest.raises(UserError, match="the stage 'answers of the target' ended with exit code 2"):
        job.wait(timeout=120)
    assert job.describe().shown == "failed" and [one.name for one in job.describe().times] == ["prompts"]
    assert "127.0.0.1:9" in (job.folder / "job.log").read_text()
    yaml = tmp_path / "jobs" / "one.yaml"
    job.change({"target": "smollm-of-nobody"})  # refused before the job begins
    job.start()
    with pytest.raises(UserError, match="smollm-of-nobody"):
        job.wait(timeout=60)
    yaml.write_text(yaml.read_text().replace("vocabulary: 64", "vocabulary: many"))
    with pytest.raises(UserError, match="one.yaml has 1 wrong key"):
        job.start()
