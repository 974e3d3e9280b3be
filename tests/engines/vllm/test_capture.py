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
def not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_GRAPHS", raising=False)


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
    ("runner", "reason"),
    [
        (runner_of("cuda", linear=True), "the target has layers that keep a state"),
        (runner_of("cpu"), "use --enforce-eager"),
    ],
)
def test_why_nothing_is_captured(
    runner: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    assert capture.captured_steps(runner, logging.getLogger("test")) is None
    (record,) = caplog.records
    assert reason in record.getMessage() and "run without graphs of their own" in record.getMessage()


@pytest.mark.parametrize("lora", [None, object()], ids=["", "--enable-lora"])
def test_the_targets_forward_is_captured_without_adapters(lora: Any) -> None:
    """What a forward with adapters computes depends on numbers of the host."""
    caches = [SimpleNamespace(layer_names=names) for names in (["a", "b"], ["head"], ["c"])]
    runner = SimpleNamespace(
        lora_config=lora,
        kv_cache_config=SimpleNamespace(kv_cache_groups=caches),
        drafter=SimpleNamespace(_draft_attn_layer_names={"head"}),
        _verifier=SimpleNamespace(groups=[SimpleNamespace(layer="a"), SimpleNamespace(layer="c")]),
        input_ids=SimpleNamespace(gpu="tokens"),
        positions="positions",
    )
    found = capture._target_forward(runner)
    assert (found is None) is (lora is not None)
    assert found is None or found[1:] == ("tokens", "positions", {"a": ["a", "b"], "c": ["c"]})
