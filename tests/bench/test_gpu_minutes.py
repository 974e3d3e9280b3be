"""`make gpu ARGS='--minutes N'`: what fits, what is ended at its limit, and which rows stay."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import environment, results, run
from benchmarks.gpu.run import LONGEST, Outcome, Places
from benchmarks.gpu.steps import STEPS, Setting, Step, find
from eagle_plugin.common.command_end import end_of

STEP = """
import os, subprocess, sys, time
from benchmarks.gpu.groups import running
from benchmarks.gpu.steps import StepError, StepSkipped

def run(setting):
    how = os.environ["HOW"]
    if how == "skips":
        raise StepSkipped("no such program")
    if how == "has none":
        raise StepError("nothing was found")
    for row in range(3):
        setting.keep({"rows": list(range(row + 1))})
    if how == "fails":
        raise StepError("the third row is wrong")
    if how in ("hangs", "does not listen"):
        if how != "hangs":
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with running(["sleep", "600"], {}) as engine:
            subprocess.Popen(["sleep", "601"])
            print(engine.pid, flush=True)
            time.sleep(600)
    return {"rows": [0, 1, 2, 3], "summary": ["four rows"], "short": setting.short}
"""
STEP_OF = Step("made-up", "made_up", "a step of this test", 10, 20, None, True)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the results of a step that does what the variable HOW says."""
    package = tmp_path / "more"
    package.mkdir()
    (package / "made_up.py").write_text(STEP)
    # The step's process finds its own module in a package that it shares with the real ones.
    (package / "sitecustomize.py").write_text(
        "import benchmarks.gpu, benchmarks.gpu.steps as steps\n"
        f"benchmarks.gpu.__path__.append({str(package)!r})\n"
        f"steps.STEPS += (steps.Step(*{tuple(STEP_OF)!r}),)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(run, "GRACE", 1.0)
    out = tmp_path / "out"
    out.mkdir()
    return out


def start(out: Path, how: str, monkeypatch: pytest.MonkeyPatch, limit: float = 60.0, short: bool = False) -> Outcome:
    monkeypatch.setenv("HOW", how)
    setting = Setting("cpu", tiny=True, short=short)
    return run.run_step(STEP_OF, setting, {"sources": "these"}, Places(out, out.parent / "all.tar.gz"), limit)


def result_in(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "made-up.json").read_text())
    return found


def is_gone(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return True


def test_a_step_that_fails_leaves_its_rows(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = start(made_up, "fails", monkeypatch)
    assert outcome.status == "failed" and outcome.sentence.startswith("the third row is wrong (exit code 2, see ")
    assert outcome.sentence.endswith("the 3 rows that it had are in " + str(made_up / "made-up.json"))
    document = result_in(made_up)
    assert document["result"] == {"rows": [0, 1, 2]} and document["unfinished"] == "the third row is wrong"
    assert not results.finished(made_up / "made-up.json", {"sources": "these"})

    # Rows that were there are not lost when the step runs again, here or with other sources; nor if it has none.
    assert start(made_up, "has none", monkeypatch).status == "failed"
    assert result_in(made_up)["unfinished"] == "the third row is wrong"
    assert start(made_up, "skips", monkeypatch) == Outcome("skipped", "no such program")
    done = start(made_up, "ends", monkeypatch, short=True)
    assert done == Outcome("done", done.sentence) and done.sentence.endswith("four rows")
    document = result_in(made_up)
    assert document["result"]["short"] and "unfinished" not in document
    assert json.loads((made_up / "earlier/made-up-1.json").read_text())["result"] == {"rows": [0, 1, 2]}
    assert results.finished(made_up / "made-up.json", {"sources": "these"})
    assert start(made_up, "ends", monkeypatch).status == "done"
    assert sorted(path.name for path in (made_up / "earlier").iterdir()) == ["made-up-1.json", "made-up-2.json"]


@pytest.mark.parametrize(
    # The second waits for guards, which give an engine ten seconds.
    "how",
    ["hangs", pytest.param("does not listen", marks=pytest.mark.matrix)],
)
def test_a_step_is_ended_at_its_limit(made_up: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """With the engines that it started, which have process groups of their own."""
    monkeypatch.setattr(run, "PACKED_EVERY", 0.5)
    began = time.monotonic()
    outcome = start(made_up, how, monkeypatch, limit=6.0)
    assert time.monotonic() - began < 120  # and not for the hour that the step hangs
    assert outcome.status == "failed" and outcome.sentence.startswith("not finished after 6 s, its limit (see ")
    assert result_in(made_up)["result"] == {"rows": [0, 1, 2]}
    assert result_in(made_up)["unfinished"] == "not finished after 6 s, its limit"
    engine = int((made_up / "made-up.log").read_text().split()[0])
    # An engine of a step that did not listen is ended by its guard, a moment later.
    while not is_gone(engine) and time.monotonic() - began < 60:
        time.sleep(0.1)
    assert is_gone(engine)
    with tarfile.open(made_up.parent / "all.tar.gz") as packed:
        assert {"made-up.json", "made-up.log"} <= set(packed.getnames())


def test_an_archive_has_what_the_engines_keep_beside_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a self-test failed, which ends the plugin's part of a step; and the measured costs."""
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "kept"))
    for name in ("selftest/a.json", "costs/b.json", "kernels/c.so", "out/build.json"):
        file = (tmp_path if name.startswith("out") else tmp_path / "kept") / name
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    Places(tmp_path / "out", tmp_path / "all.tar.gz").pack()
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        assert packed.getnames() == ["build.json", "cache/selftest/a.json", "cache/costs/b.json"]


def test_a_result_of_another_device_is_kept(tmp_path: Path) -> None:
    for device in ("one", "other"):
        results.Results(tmp_path, STEP_OF, {"device": device}).finish({"rows": [device]})
    assert result_in(tmp_path)["result"] == {"rows": ["other"]}
    assert json.loads((tmp_path / "earlier/made-up-1.json").read_text())["identity"] == {"device": "one"}


def test_a_whole_result_counts_for_a_short_one(tmp_path: Path) -> None:
    for written, wanted, counts in (
        ("full", "short", True),
        ("short", "short", True),
        ("short", "full", False),
        ("tiny", "short", False),
    ):
        results.Results(tmp_path, STEP_OF, {"size": written}).finish({})
        assert results.finished(tmp_path / "made-up.json", {"size": wanted}) == counts


class Clock:
    """Stands in for `time` in run.py: a step takes what `takes` says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, float]]:
    """The steps that are started, whether in the short form, and their limits; each takes what is expected."""
    clock, started = Clock(), []

    def run_step(step: Step, setting: Setting, about: dict[str, str], places: Places, limit: float) -> Outcome:
        assert (about["size"] == "short") == setting.short
        started.append((step.name, setting.short, limit))
        clock.now += min(step.expected, limit)
        return Outcome("done")

    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(run, "run_step", run_step)
    monkeypatch.setattr(run, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(environment, "driver", lambda: "none")
    return started


def test_what_fits_is_done_in_order(
    tmp_path: Path, on_a_gpu: list[tuple[str, bool, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(lambda: run.main(["--engine", "all", "--minutes", "14", "--out", str(tmp_path)]), False) == 0
    names = [name for name, _, _ in on_a_gpu]
    yardsticks, models = ["vllm-yardstick", "yardstick"], ["vllm-model", "model"]
    assert names[:7] == ["environment", "build", "vllm-build", *yardsticks, *models]
    assert [name for name, short, _ in on_a_gpu if short] == [*yardsticks, *models, "kernels"]
    assert sum(step.expected for step in STEPS if step.name in names) <= 840
    out = capsys.readouterr().out
    left = [step.name for step in STEPS if step.name not in names]
    assert f"left out for lack of time: {', '.join(left)}; the same command" in out
    assert "server: left out: it takes about 240 s, and " in out
    on_a_gpu.clear()

    # Nine minutes: both yardsticks, which decide.
    assert end_of(lambda: run.main(["--engine", "all", "--minutes", "9", "--out", str(tmp_path)]), False) == 0
    assert set(yardsticks) < {name for name, _, _ in on_a_gpu}
    capsys.readouterr()
    on_a_gpu.clear()

    # A minute: what is wanted most does not fit, what fits is done, and no limit is beyond the end.
    assert end_of(lambda: run.main(["--engine", "all", "--minutes", "1", "--out", str(tmp_path)]), False) == 0
    assert [name for name, _, _ in on_a_gpu] == ["environment", "build", "vllm-build"]
    assert [limit for _, _, limit in on_a_gpu] == [60.0, 55.0, 35.0]
    on_a_gpu.clear()

    # Without --minutes: everything, whole, with a limit that only what hangs reaches.
    assert end_of(lambda: run.main(["--engine", "all", "--out", str(tmp_path)]), False) == 0
    assert on_a_gpu == [(step.name, False, LONGEST) for step in STEPS]


def test_an_engine_in_a_carried_folder(tmp_path: Path) -> None:
    """Its version is that of the folder, which this process does not import from."""
    places = Places(tmp_path, site=tmp_path / "site")
    for engine in ("vllm", "common"):
        (tmp_path / "site" / engine / f"{engine}-9.8.dist-info").mkdir(parents=True)
        (tmp_path / "site" / engine / f"{engine}-9.8.dist-info/METADATA").write_text(f"Name: {engine}\nVersion: 9.8\n")
    vllm, common = str(tmp_path / "site/vllm"), str(tmp_path / "site/common")
    # The library is built once for each set of packages that a step runs with: another tvm-ffi, another library.
    assert places.packages(find("vllm-build")) == places.packages(find("vllm-model")) == [vllm, common]
    assert places.packages(find("build")) == places.packages(find("round")) == [common]
    # vLLM's FlashAttention is there to be compared with; all else is that of the other steps without an engine.
    assert places.packages(find("speed")) == [common, vllm]
    assert environment.engine_version("vllm", places.packages(find("vllm-build"))) == {"vllm": "9.8"}
    assert environment.engine_version("vllm", places.packages(find("build"))) != {"vllm": "9.8"}
    assert sys.path == [path for path in sys.path if str(tmp_path) not in path]
