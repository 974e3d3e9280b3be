"""When our worker begins its rounds: after all that vLLM warms up, so that what serves is captured and measured."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.worker import cpu_worker, gpu_worker

from eagle_plugin.vllm import worker
from eagle_plugin.vllm.cpu_worker import TreeCPUWorker
from eagle_plugin.vllm.worker import TreeWorker

OURS = ["capture_steps", "check_rounds", "choose_by_costs", "open_mailbox", "open_features", "compile_chains"]


def made(of: type[TreeWorker], v2: bool, eager: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker without a device, whose warm-up is the engine's; calls: the names of what it calls."""

    def note(name: str, result: Any = None) -> Any:
        return lambda *_, **__: (calls.append(name), result)[1]

    silent = ("get_pp_group", "freeze_gc_heap", "maybe_attach_gc_debug_callback", "enable_gpu_sync_check")
    for name in silent:
        monkeypatch.setattr(gpu_worker, name, lambda: SimpleNamespace(is_last_rank=True))
    for module in (gpu_worker, cpu_worker, worker):
        monkeypatch.setattr(module, "set_random_seed", note("set_random_seed"))
    for name in ("kernel_warmup", "warmup_kernels"):
        monkeypatch.setattr(gpu_worker, name, note(name))
    monkeypatch.setattr("vllm.v1.worker.gpu.warmup.warmup_kernels", note("warmup_kernels"))
    monkeypatch.setattr("vllm.utils.jit_monitor.activate", note("the monitor of late compilation"))
    for module in ("worker", "cpu_worker"):
        monkeypatch.setattr(f"eagle_plugin.vllm.{module}.rank_logger", lambda logger: logger)
    for name in ("check_rounds", "compile_chains"):
        monkeypatch.setattr(worker, name, note(name))
    monkeypatch.setattr(worker, "plugin_config", lambda _: SimpleNamespace(subject=None))
    runner = SimpleNamespace(
        **{name: note(name) for name in OURS if name not in ("check_rounds", "compile_chains")},
        capture_model=note("capture_model", 0),
        eplb=SimpleNamespace(suppress=nullcontext),
        get_model=lambda: None,
        is_pooling_model=False,
        kv_caches=[None],
        lora_config=None,
        maybe_remove_all_loras=lambda _: None,
        _dummy_run=note("_dummy_run", (None, None)),
        _dummy_sampler_run=lambda **_: None,
    )
    compilation = SimpleNamespace(
        mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.NONE, compilation_time=0.0, encoder_compilation_time=0.0
    )
    found: Any = of.__new__(of)
    vars(found).update(
        model_runner=runner,
        use_v2_model_runner=v2,
        compilation_config=compilation,
        vllm_config=SimpleNamespace(
            compilation_config=compilation,
            kernel_config=SimpleNamespace(enable_jit_warmup=True),
            speculative_config=None,
        ),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=1),
        model_config=SimpleNamespace(enforce_eager=eager, seed=0),
        observability_config=SimpleNamespace(jit_monitor_mode="warn", jit_monitor_verbose=False),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        _get_cudagraph_capture_context=nullcontext,
    )
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_gpu_begins_at_the_end_of_the_warm_up(v2: bool, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tunes kernels, and V2 serves steps of its own making, whose tokens and times would teach the policy."""
    calls: list[str] = []
    made(TreeWorker, v2, eager, calls, monkeypatch).compile_or_warm_up_model()
    first = calls.index("capture_steps")
    assert calls[first:] == [*OURS, "set_random_seed", "the monitor of late compilation"]
    wanted = {"kernel_warmup", "set_random_seed", *({"warmup_kernels"} if v2 else {"_dummy_run"})}
    assert set(calls[:first]) == wanted | (set() if eager else {"capture_model"})


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
def test_a_cpu_begins_there_too(v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("eagle_plugin.vllm.cpu_worker.use_huge_pages", lambda _: calls.append("huge pages"))
    made(TreeCPUWorker, v2, True, calls, monkeypatch).compile_or_warm_up_model()
    first = calls.index("capture_steps")
    assert calls[first:] == [*OURS, "set_random_seed"]
    assert calls[0] == "huge pages" and set(calls[1:first]) <= {"set_random_seed", "warmup_kernels"}


@pytest.mark.parametrize(
    ("profiled", "estimates", "wanted"),
    [
        ({}, "1", 0),  # with --kv-cache-memory nothing is profiled
        ({"peak_activation_memory": 5 << 30, "cudagraph_memory_estimate": 1 << 30}, "1", 4 << 30),
        ({"peak_activation_memory": 5 << 30, "cudagraph_memory_estimate": 1 << 30}, "0", 5 << 30),
    ],
)
def test_what_a_step_needs_beside_the_graphs(
    profiled: dict[str, int], estimates: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's profile, without the graphs that it estimates, and what the head reads later."""
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", estimates)
    calls: list[str] = []
    found = made(TreeWorker, v2=False, eager=False, calls=calls, monkeypatch=monkeypatch)
    vars(found).update(profiled)
    found.begin_rounds()
    assert found.model_runner.needed_bytes == (wanted + (256 << 20) if wanted else 0)
    source = "".join(inspect.getsource(gpu_worker.Worker.determine_available_memory).split())
    assert "profile_result.transient_peak_headroom+cudagraph_memory_estimate_applied" in source
