"""`make gpu` on a machine without a GPU: its driver, and the small form of its steps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import equality, graphs, phases, round_speed, run
from benchmarks.gpu.decoding import TreeDecoder
from benchmarks.gpu.environment import engine_version
from benchmarks.gpu.results import finished
from benchmarks.gpu.steps import STEPS, Setting, StepError, steps_of
from eagle_plugin.common.command_end import end_of
from eagle_plugin.kernels import loader
from eagle_plugin.runtime.accept import KVCaches

ROOT = Path(__file__).parents[2]
TINY = Setting("cpu", tiny=True)


def drive(out: Path, *options: str) -> int:
    return end_of(lambda: run.main(["--out", str(out), "--device", "cpu", "--tiny", *options]), owns_process=False)


def test_steps_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step that fails or is skipped does not stop the others; finished ones are not run again."""
    steps = ("--steps", "environment", "build", "server")
    monkeypatch.setenv("EAGLE_KERNELS", "torch")
    assert drive(tmp_path, *steps) == 1
    out, err = capfd.readouterr()
    assert "environment: done: " in out
    assert "build: failed: libeagle_cpu.so was built but does not load" in out and "unset EAGLE_KERNELS" in out
    assert "server: skipped: the demo of a CPU is `make demo`" in out
    assert err == "error: 1 of 3 steps failed: build\n" and "Traceback" not in out
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["environment.json"]

    monkeypatch.delenv("EAGLE_KERNELS")
    (tmp_path / "build.json").write_text("{")
    assert drive(tmp_path, *steps) == 0
    out, err = capfd.readouterr()
    assert "environment: done before: " in out and "build: done: " in out
    assert f"{tmp_path / 'build.json'} is not JSON" in err
    document = json.loads((tmp_path / "build.json").read_text())
    assert document["identity"]["torch"] == torch.__version__ and document["identity"]["size"] == "tiny"
    assert document["result"]["library"] == "libeagle_cpu.so" and document["date"]

    # An engine's step counts for the version of the engine it ran with; a step without an engine for all engines.
    assert engine_version("vllm").keys() == {"vllm"} and engine_version(None) == {}

    # Of other sources: not finished. Finished, but asked for again: it runs.
    same, other = document["identity"], document["identity"] | {"sources": "other"}
    assert finished(tmp_path / "build.json", same) and not finished(tmp_path / "build.json", other)
    (tmp_path / "server.json").write_text(json.dumps({"identity": same | engine_version("sglang")}))
    for option, wanted in (("--steps", "done before"), ("--again", "skipped")):
        assert drive(tmp_path, *dict.fromkeys((option, "--steps")), "server") == 0
        assert f"server: {wanted}: " in capfd.readouterr().out


def test_the_steps_of_vllm(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without an engine are the same; where vLLM is not installed, one sentence says so."""
    steps = {engine: steps_of(engine) for engine in ("sglang", "vllm", "all")}
    names = {engine: [step.name for step in found] for engine, found in steps.items()}
    free = {engine: [step.name for step in found if step.engine is None] for engine, found in steps.items()}
    assert free["sglang"] == free["vllm"] == free["all"] and len(free["all"]) == 9
    assert [name for name in names["sglang"] if name not in free["all"]] == ["yardstick", "model", "text", "server"]
    assert [name for name in names["vllm"] if name not in free["all"]] == [
        "vllm-build", "vllm-yardstick", "vllm-model", "vllm-selftest", "vllm-server",
    ]  # fmt: skip
    assert set(names["all"]) == {step.name for step in STEPS} and len(names["all"]) == len(STEPS)
    # What decides comes first.
    assert names["vllm"][:4] == ["environment", "build", "vllm-build", "vllm-yardstick"]
    assert names["all"][3:7] == ["vllm-yardstick", "yardstick", "vllm-model", "model"]

    chosen = [step for step in STEPS if step.name in ("vllm-selftest", "vllm-server")]
    monkeypatch.setattr(run, "steps_of", lambda _: chosen)
    assert drive(tmp_path, "--engine", "vllm") == 0
    out = capfd.readouterr().out
    assert "vllm-server: skipped: the demo of a CPU is `make demo`" in out
    if importlib.util.find_spec("vllm") is None:
        assert "vllm-selftest: skipped: the module vllm is not installed, wanted vLLM and eagle-plugin" in out
    else:
        found = json.loads((tmp_path / "vllm-selftest.json").read_text())
        assert found["result"]["passed"] and found["identity"]["vllm"] != "none"
        assert drive(tmp_path, "--engine", "vllm") == 0
        assert "vllm-selftest: done before: " in capfd.readouterr().out


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(engine: str) -> None:
    # Not with the options of the `make test` that runs this.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    command = ["make", "gpu", f"ENGINE={engine}", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "no NVIDIA GPU was found" in line and "nvcc" in line
    assert "Traceback" not in done.stderr


def test_an_unknown_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(tmp_path, "--steps", "rounds") == 2
    assert capsys.readouterr().err.startswith("error: there is no step 'rounds', wanted one of environment, build")


def test_every_step_has_a_module() -> None:
    for step in STEPS:
        assert (ROOT / f"benchmarks/gpu/{step.module}.py").exists(), step


def test_trees_give_plain_greedy_text() -> None:
    found = equality.run(TINY)
    kinds = [(row["shape"], row["captured"]) for row in found["rounds"]]
    assert kinds == [("1/4/5", False), ("1/4/5", True), ("3/4/16", False), ("3/4/16", True)]
    assert all(row["accept_length"] > 1.1 for row in found["rounds"])
    assert loader.wrap_module(1) == 1  # the emulator has gone


@pytest.mark.parametrize("fault", ["rows are not moved", "wrong ancestors", "a token is dropped"])
def test_a_wrong_round_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "rows are not moved":
        monkeypatch.setattr(KVCaches, "move_accepted", lambda *_: None)
    elif fault == "wrong ancestors":
        draft = TreeDecoder.draft

        def flat(decoder: TreeDecoder) -> Any:
            drafts = draft(decoder)
            return drafts._replace(tree=drafts.tree._replace(ancestors=torch.ones_like(drafts.tree.ancestors)))

        monkeypatch.setattr(TreeDecoder, "draft", flat)
    else:
        extend = TreeDecoder.extend

        def skipping(decoder: TreeDecoder, path: Any) -> None:
            extend(decoder, path)
            decoder.lengths.sub_(1)

        monkeypatch.setattr(TreeDecoder, "extend", skipping)
    with pytest.raises(StepError, match="is not plain greedy text"):
        equality.run(TINY)


def test_captured_phases_are_compared() -> None:
    assert graphs.run(TINY)["cases"][0]["inputs"] == 4


@pytest.mark.parametrize("phase", phases.NAMES)
def test_a_stale_capture_is_found(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that does nothing: its result is that of the input it was captured with."""
    made: list[phases.Replay] = []
    replay = phases.Replay.__call__

    def stale(self: phases.Replay) -> Any:
        if self not in made:
            made.append(self)
        return self.out if made.index(self) % 4 == phases.NAMES.index(phase) else replay(self)

    monkeypatch.setattr(phases.Replay, "__call__", stale)
    with pytest.raises(StepError, match=f"the captured {phase} is not the eager one"):
        graphs.run(TINY)


def test_a_tensor_that_python_replaces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured draft goes on reading the memory that the roots had when it was captured."""
    extend = TreeDecoder.extend

    def replacing(decoder: TreeDecoder, path: Any) -> None:
        extend(decoder, path)
        decoder.roots = decoder.roots.clone()

    monkeypatch.setattr(TreeDecoder, "extend", replacing)
    with pytest.raises(StepError, match="the captured draft is not the eager one"):
        graphs.run(TINY)


def test_times_of_a_round() -> None:
    found = round_speed.run(TINY)
    assert [(row["batch"], row["shape"], row["temperature"]) for row in found["rows"]] == [
        (batch, shape, temperature)
        for batch in (1, 2)
        for shape, temperature in (("1/4/5", 0.0), ("3/4/16", 0.0), ("3/4/16", 0.8))
    ]
    for row in found["rows"]:
        assert all(row["ms"][name] > 0 for name in phases.NAMES)
        assert row["ms"]["round"] == pytest.approx(sum(row["ms"][name] for name in phases.NAMES), abs=1e-3)
        assert row["break_even_accept_length"] > 0
