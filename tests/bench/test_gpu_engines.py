"""The engines of steps `model` and `vllm-model` of `make gpu`: their processes, and how they are started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu.model_cases import (
    CAPTURED_ROWS,
    CASES,
    SAMPLED_CASES,
    environment,
    sglang_arguments,
    vllm_arguments,
)
from benchmarks.gpu.model_process import started
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
    compiled, eager = (vllm_arguments(case, tmp_path, tmp_path, True, eager) for eager in (False, True))
    assert compiled["kv_cache_memory_bytes"] == eager["kv_cache_memory_bytes"] == 4 << 30
    assert compiled["cudagraph_capture_sizes"] == CAPTURED_ROWS and not compiled["enforce_eager"]
    assert "cudagraph_capture_sizes" not in eager and eager["enforce_eager"]
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
