"""The engines of steps `model` and `vllm-model` of `make gpu`: their processes, and how they are started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.model_cases import (
    CAPTURED_ROWS,
    CASES,
    COMPILED,
    GRAPHS,
    SAMPLED_CASES,
    engine_facts,
    environment,
    modes_of,
    sglang_arguments,
    vllm_arguments,
)
from benchmarks.gpu.model_process import EngineProcess, started
from benchmarks.gpu.steps import Setting, StepError

TINY = Setting("cpu", tiny=True)


def test_an_engine_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ValueError: no such model' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (
        started("plain", tmp_path, tmp_path, tmp_path, TINY) as engine,
        pytest.raises(StepError, match="^plain decoding does not answer: ValueError: no such model$"),
    ):
        engine.wait_for_start(60.0)


def test_an_engine_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with started("plain", tmp_path, tmp_path, tmp_path, TINY) as engine:
        with pytest.raises(StepError, match=r"^plain decoding does not answer: 1 s are over, see its log$"):
            engine.wait_for_start(1.0)
        engine.end()


def test_engines_that_share_a_gpu(tmp_path: Path) -> None:
    """vLLM measures the memory that all of them take; what it captures is what the requests need."""
    case = CASES["vllm"]["plugin"]
    assert modes_of("vllm", True) == (COMPILED, GRAPHS) and modes_of("sglang", True) == (GRAPHS,)
    compiled, graphs = (vllm_arguments(case, tmp_path, tmp_path, True, mode) for mode in modes_of("vllm", True))
    assert compiled["kv_cache_memory_bytes"] == 4 << 30 and compiled["cudagraph_capture_sizes"] == CAPTURED_ROWS
    assert not compiled["enforce_eager"] and "compilation_config" not in compiled
    # Without compilation all else is the same: vLLM captures whole decode steps, and the plugin its rounds.
    assert graphs == compiled | {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    assert CAPTURED_ROWS[-1] == compiled["max_num_seqs"] * 16
    assert not {"kv_cache_memory_bytes", "cudagraph_capture_sizes"} & set(
        vllm_arguments(case, tmp_path, tmp_path, False)
    )


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engines_differ_in_speculation_alone(engine: str, tmp_path: Path) -> None:
    arguments = {"sglang": sglang_arguments, "vllm": vllm_arguments}[engine]
    key = {"sglang": "speculative_algorithm", "vllm": "speculative_config"}[engine]
    for case in CASES[engine].values():
        given, variables = arguments(case, tmp_path, tmp_path, True), environment(engine, case, True)
        assert (key in given) == (case.shape is not None) and given["dtype"] == case.dtype
        assert ("TRITON_F32_DEFAULT" in variables) == (case.dtype == "float32")
        assert (variables["EAGLE_PLUGIN"] != "0") == case.plugin
    plain, ours = (arguments(CASES[engine][name], tmp_path, tmp_path, True) for name in ("plain", "plugin"))
    assert {name: ours[name] for name in plain} == plain
    assert set(SAMPLED_CASES[engine]) < set(CASES[engine])


def test_sglang_starts_with_kernels_that_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for sglang-kernel is a module without a distribution."""
    common = pytest.importorskip("sglang.srt.utils.common")

    def version(name: str) -> str:
        raise common.PackageNotFoundError(name)

    monkeypatch.setattr(common, "version", version)
    monkeypatch.delenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", raising=False)
    with pytest.raises(Exception, match=r"is not installed\. reinstall it"):
        common.assert_pkg_version("sglang-kernel", "0.4.9", "reinstall it")
    for name, value in environment("sglang", CASES["sglang"]["plain"], True).items():
        monkeypatch.setenv(name, value)
    common.assert_pkg_version("sglang-kernel", "0.4.9", "reinstall it")


def test_what_sglangs_rows_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert engine_facts("vllm", True) == {}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.9")
    assert engine_facts("sglang", True) == {"sgl_kernel": "0.4.9", "attention_backend": "triton"}
    monkeypatch.setattr(importlib.metadata, "version", missing)
    for found, kernels in ((object(), "a stand-in"), (None, "none")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        assert engine_facts("sglang", True)["sgl_kernel"] == kernels


def test_what_the_log_says_of_graphs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = "eagle-plugin: there is no memory for the CUDA graphs of batches of 8, 32 requests; they are padded"
    for written, wanted in (("", []), (f"{text}\n{text}", [8, 32])):
        log.write_text(written)
        assert EngineProcess(CASES["vllm"]["plugin"], None, log).without_graphs() == wanted  # type: ignore[arg-type]
