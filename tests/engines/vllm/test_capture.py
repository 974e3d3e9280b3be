"""Which batch sizes of a runner are captured, and where nothing is."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from eagle_plugin.engines.vllm import capture


def runner_of(kind: str, *, eager: bool = False, mode: Any = CUDAGraphMode.PIECEWISE, linear: bool = False) -> Any:
    model = SimpleNamespace(enforce_eager=eager)
    config = SimpleNamespace(model_config=model, compilation_config=SimpleNamespace(cudagraph_mode=mode))
    names = {"layer"} if linear else set()
    device, layers = SimpleNamespace(type=kind), SimpleNamespace(names=names)
    return SimpleNamespace(vllm_config=config, model_config=model, device=device, linear=layers)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_GRAPHS", raising=False)
    monkeypatch.setattr(capture, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_sizes_on_a_gpu(most: int, sizes: list[int]) -> None:
    assert capture.cuda_sizes(most) == sizes


@pytest.mark.parametrize(
    "runner",
    [runner_of("cuda", eager=True), runner_of("cuda", mode=CUDAGraphMode.NONE), runner_of("cpu", eager=True)],
    ids=["--enforce-eager", "cudagraph_mode NONE", "a CPU"],
)
def test_no_graphs_are_wanted(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert capture.captured_steps(runner, logging.getLogger("test")) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("runner", "ranks", "reason"),
    [
        (runner_of("cuda"), 2, "--tensor-parallel-size above 1"),
        (runner_of("cuda", linear=True), 1, "the target has layers that keep a state"),
        (runner_of("cpu"), 1, "use --enforce-eager"),
    ],
)
def test_why_nothing_is_captured(
    runner: Any, ranks: int, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    monkeypatch.setattr(capture, "get_tensor_model_parallel_world_size", lambda: ranks)
    assert capture.captured_steps(runner, logging.getLogger("test")) is None
    (record,) = caplog.records
    assert reason in record.getMessage() and "run without graphs of their own" in record.getMessage()
