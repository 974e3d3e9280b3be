"""Which batch sizes of a runner are captured, and where nothing is."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.worker import workspace

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.runtime.captured_rounds import CapturedRounds
from eagle_plugin.vllm import capture
from eagle_plugin.vllm.attention import TreeMetadataBuilder
from eagle_plugin.vllm.graph_modes import wants_graphs


def runner_of(
    kind: str,
    *,
    eager: bool = False,
    mode: Any = CUDAGraphMode.PIECEWISE,
    compiles: Any = CompilationMode.VLLM_COMPILE,
    engines: int = 1,
) -> Any:
    model = SimpleNamespace(enforce_eager=eager, use_mla=False)
    compilation = CompilationConfig(cudagraph_mode=mode, mode=CompilationMode.NONE if eager else compiles)
    parallel = SimpleNamespace(data_parallel_size=engines, world_size=1)
    config = SimpleNamespace(model_config=model, compilation_config=compilation, parallel_config=parallel)
    device = SimpleNamespace(type=kind)
    wanted = wants_graphs(config)  # as a runner asks when it is made
    return SimpleNamespace(vllm_config=config, model_config=model, device=device, wants_graphs=wanted, needed_bytes=0)


@pytest.fixture(autouse=True)
def not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_GRAPHS", raising=False)


@pytest.mark.parametrize(
    "runner",
    [runner_of("cuda", eager=True), runner_of("cuda", mode=CUDAGraphMode.NONE), runner_of("cpu", eager=True)],
    ids=["--enforce-eager", "cudagraph_mode NONE", "a CPU"],
)
def test_no_graphs_are_wanted(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert capture.captured_steps(runner, logging.getLogger("test")) is None
    assert not caplog.records


def test_graphs_of_ours_need_no_compilation() -> None:
    """Without it vLLM has none: it takes `NONE` for its default when it makes the caches."""
    runner = runner_of("cuda", mode=CUDAGraphMode.FULL_DECODE_ONLY, compiles=CompilationMode.NONE)
    compilation = runner.vllm_config.compilation_config
    compilation.resolve_cudagraph_mode_and_sizes(TreeMetadataBuilder.get_cudagraph_support(None, None), "CUSTOM")
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE and not wants_graphs(runner.vllm_config)
    assert runner.wants_graphs and capture._unserved(runner, "cuda") == ""


def test_what_is_not_compiled_can_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    assert capture._unserved(runner_of("cpu", compiles=CompilationMode.NONE), "cpu") == ""


def test_engines_that_step_together_have_no_graphs() -> None:
    """Each has another batch at the same time, and what they exchange has its size."""
    runner = runner_of("cuda", compiles=CompilationMode.NONE, engines=2)
    assert "step together" in capture._unserved(runner, "cuda")


def test_why_nothing_is_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    assert capture.captured_steps(runner_of("cpu"), logging.getLogger("test")) is None
    (record,) = caplog.records
    assert "use --enforce-eager" in record.getMessage() and "run without graphs of their own" in record.getMessage()


def test_no_graphs_of_latent_attention(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    runner = runner_of("cpu", compiles=CompilationMode.NONE)
    runner.model_config.use_mla = True
    assert capture.captured_steps(runner, logging.getLogger("test")) is None
    assert "latent (MLA)" in caplog.text


class Kernels(CapturedRounds[Any]):
    """Stands for the functions of a step whose kernels ask vLLM's workspace for memory."""

    narrows = False

    def __init__(self, scratch: int) -> None:
        """scratch: bytes that no kernel keeps."""
        super().__init__()
        self._scratch, self.locks = scratch, list[Any]()

    def capture(self, capturer: Any, shapes: Any, sizes: Any, memory: Any, with_sums: bool) -> None:
        stream = object()  # another one for every capture

        def verify() -> Any:
            manager = workspace.current_workspace_manager()
            self.locks.append(manager.get_persistent(("marlin_locks", stream), (4,), torch.int, zero_init=True))
            manager.get_simultaneous(((self._scratch,), torch.uint8))
            return self.locks[-1] + 1

        def capture_size(size: int) -> None:
            self.functions.capture(capturer, ("verify", size, PLAIN, None), verify)

        self._capture_sizes(shapes, sizes, memory, lambda *_: None, capture_size)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's workspace as it is after captures of its own: locked, with 256 bytes of scratch memory."""
    monkeypatch.setattr(workspace, "_manager", None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.init_workspace_manager(torch.device("cpu"))
    manager = workspace.current_workspace_manager()
    manager.get_simultaneous(((256,), torch.uint8))
    workspace.lock_workspace()
    return manager


def captured(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EAGLE_GRAPHS", "emulate")
    monkeypatch.setattr(capture, "new_step", lambda runner: kernels)
    monkeypatch.setattr(capture, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(capture, "in_any_rank", bool)
    runner = runner_of("cpu", compiles=CompilationMode.NONE)
    vars(runner).update(
        _caps=Shape(2, 2, 4),
        _limits=None,
        _policy_mode="fixed",
        drafter=SimpleNamespace(masked_rows_per_request=lambda caps: 1),
        max_num_reqs=2,
        max_num_tokens=64,
    )
    return capture.captured_steps(runner, logging.getLogger("test"))


def test_kernels_get_memory_of_their_own_for_our_captures(locked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marlin has its locks per stream, and vLLM locks its workspace before our captures begin."""
    with pytest.raises(AssertionError, match="was not allocated during"):  # the control
        locked.get_persistent(("marlin_locks", object()), (4,), torch.int)
    for kernels in (Kernels(256), Kernels(256)):  # at the start, and after an exchange of the head
        step = captured(kernels, monkeypatch)
        assert step.sizes() == [2, 1] and len(step.functions) == 2
        assert len({one.data_ptr() for one in kernels.locks}) == 1
        assert locked.is_locked()
        with pytest.raises(AssertionError, match="was not allocated during"):
            locked.get_persistent(("marlin_locks", object()), (4,), torch.int)


def test_our_captures_move_no_scratch_memory_of_vllms_graphs(locked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = locked._current_workspaces
    with pytest.raises(AssertionError, match="growth is not allowed"):
        captured(Kernels(257), monkeypatch)
    assert locked._current_workspaces[0] is before and locked.is_locked()
    with pytest.raises(AssertionError, match="was not allocated during"):
        locked.get_persistent(("marlin_locks", object()), (4,), torch.int)


@pytest.mark.parametrize("lora", [None, object()], ids=["", "--enable-lora"])
def test_the_targets_forward_is_captured_without_adapters_of_the_host(
    lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_gpu_adapters.py` has those that GPUs serve."""
    monkeypatch.setattr(capture, "can_capture_adapters", lambda runner: False)
    caches = [SimpleNamespace(layer_names=names) for names in (["a", "b"], ["head"], ["c"])]
    runner = SimpleNamespace(
        lora_config=lora,
        kv_cache_config=SimpleNamespace(kv_cache_groups=caches),
        drafter=SimpleNamespace(_draft_attn_layer_names={"head"}),
        _verifier=SimpleNamespace(groups=[SimpleNamespace(layer="a"), SimpleNamespace(layer="c")]),
        query_rows=lambda: ("tokens", "positions"),
        rotary_rows=lambda: "positions of three axes",
    )
    found = capture._target_forward(runner, [])
    assert (found is None) is (lora is not None)
    assert found is None or found[1:] == ("tokens", "positions of three axes", {"a": ["a", "b"], "c": ["c"]}, [], None)
