"""Which configurations of vLLM are served on a GPU, of which a process of its own has told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_configs import answering, needs

from eagle_plugin.common import keyed_json
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.selftest import record
from eagle_plugin.selftest.launch import Answer
from eagle_plugin.selftest.shapes import ModelShape
from eagle_plugin.selftest.subject import round_key
from eagle_plugin.vllm import plugin_config, selftest, support, unsupported

pytestmark = pytest.mark.usefixtures("lines")


@pytest.mark.parametrize(("given", "wanted"), [({}, True), ({"async_scheduling": False}, False)])
def test_a_gpu_is_served(
    given: dict[str, Any], wanted: bool, gpu_config: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, Answer([], ["eagle-plugin: the self-test of the kernels passed in 9.0 s"]))
    config = gpu_config(tensor_parallel_size=2, additional_config={"eagle_plugin": given})
    assert config.use_v2_model_runner
    support.choose_worker(config)
    assert config.parallel_config.worker_cls == unsupported.WORKERS["cuda"]
    assert not config.use_v2_model_runner and config.scheduler_config.async_scheduling is wanted
    assert [line.rpartition(": ")[2][:20] for line in lines] == ["the self-test of the", "trees are served by "]
    (subject,) = asked
    assert plugin_config.plugin_config(config.speculative_config).subject is subject
    assert subject.device == "cuda" and subject.devices == 2 and list(subject.head_dims) == [32, 32]
    shape, heads = ModelShape(**subject.shape), config.model_config.hf_config.num_attention_heads
    assert (shape.heads, shape.head_dim, shape.dtype) == (heads // 2, 32, "float32")
    assert shape.tree == plugin_config.caps_of(config.speculative_config)
    support.choose_worker(config)  # vLLM completes it again
    assert len(asked) == 1 and config.scheduler_config.async_scheduling is wanted


def test_a_gpu_is_served_only_when_asked_for(
    gpu_config: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, Answer([], []))
    config = gpu_config()
    monkeypatch.setenv("EAGLE_PLUGIN", "1")
    support.choose_worker(config)
    assert config.parallel_config.worker_cls == unsupported.ENGINE_WORKERS["cuda"] and config.use_v2_model_runner
    (line,) = lines
    assert line.endswith("GPUs: no GPU has run the plugin's worker for vLLM yet; EAGLE_PLUGIN=force tries it")
    assert not asked and not plugin_config.is_served(config.speculative_config)


def test_a_gpu_that_fails_is_left_to_vllm(gpu_config: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Answer(["device Tesla T4: compute capability 7.5, at least 8.0 is served"], []))
    config = gpu_config()
    support.choose_worker(config)
    assert config.parallel_config.worker_cls == unsupported.ENGINE_WORKERS["cuda"] and config.use_v2_model_runner
    assert not plugin_config.is_served(config.speculative_config) and config.scheduler_config.async_scheduling
    assert lines == [f"{lines[0].partition(': ')[0]}: eagle3 is served by vLLM's own worker: device Tesla T4: compute "
                     "capability 7.5, at least 8.0 is served"]  # fmt: skip


@pytest.mark.parametrize("reasons", [[], ["device Tesla T4: compute capability 7.5, at least 8.0 is served"]])
def test_processes_that_a_launcher_starts_do_not_ask_again(
    reasons: list[str], gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server of several makes the configuration too, while the engines measure the free memory."""
    asked = answering(monkeypatch, Answer(reasons, []))
    launchers, servers, workers = (gpu_config() for _ in range(3))
    support.choose_worker(launchers)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for config in (servers, workers):
        support.choose_worker(config)
        assert plugin_config.is_served(config.speculative_config) is not bool(reasons)
    assert len(asked) == 1


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("splitting", [None, []])
@pytest.mark.parametrize("fuses", [False, True])
def test_what_vllm_makes_full_is_taken_back(
    fuses: bool,
    splitting: list[str] | None,
    inductor: bool,
    mode: CUDAGraphMode,
    gpu_config: Any,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It decides after it has asked the platform; then the start would end where the caches are made."""
    answering(monkeypatch, Answer([], []))
    config, served = gpu_config(), gpu_config()
    for made in (config, served):
        compilation = made.compilation_config
        compilation.mode, compilation.cudagraph_mode, compilation.splitting_ops = (
            CompilationMode.VLLM_COMPILE, mode, splitting
        )  # fmt: skip
        compilation.pass_config.fuse_attn_quant, compilation.use_inductor_graph_partition = fuses, inductor
    support.choose_worker(served)
    assert plugin_config.is_served(served.speculative_config)
    for made in (config, served):
        made.compilation_config.set_splitting_ops_for_v1(all2all_backend="")
    stock, compilation = config.compilation_config, served.compilation_config
    assert compilation.cudagraph_mode.mixed_mode() != CUDAGraphMode.FULL
    is_fused = fuses and not inductor
    if stock.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        (line,) = [line for line in lines if "taken back" in line]
        assert ("fuse_attn_quant" in line, "cudagraph_mode FULL" in line) == (is_fused, mode == CUDAGraphMode.FULL)
        assert compilation.splitting_ops_contain_attention()  # so that graphs are left where there is no FULL
    elif not is_fused:
        assert stock.splitting_ops == compilation.splitting_ops  # the control: all else stays
    assert compilation.pass_config.fuse_attn_quant is (fuses and inductor)


@pytest.mark.parametrize("change", ["compilation", "graphs"])
def test_the_record_of_a_round_is_of_one_way_to_run_it(
    change: str, gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what torch compiled wrongly would leave the server to vLLM without compilation too."""
    asked = answering(monkeypatch, Answer([], []))
    compiled, other = (gpu_config(enforce_eager=False) for _ in range(2))
    if change == "compilation":
        object.__setattr__(other.compilation_config, "mode", CompilationMode.NONE)
    object.__setattr__(compiled.compilation_config, "mode", CompilationMode.VLLM_COMPILE)
    for config in (compiled, other):
        object.__setattr__(config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
        config.compilation_config.splitting_ops = None  # as it is when the platform is asked
    if change == "graphs":
        object.__setattr__(other.compilation_config, "cudagraph_mode", CUDAGraphMode.NONE)
    for config in (compiled, other):
        support.choose_worker(config)
    first, second = (subject.real_round for subject in asked)
    key = {"compilation": "compiled", "graphs": "graphs"}[change]
    assert (first[key], second[key]) == (True, False)


def record_of(config: VllmConfig) -> Path:
    """Where the record of this server's round is."""
    subject = selftest.subject_of(config, Shape(2, 4, 8), Levels.RECURRENT)
    assert subject is not None
    return keyed_json.path_of(Path(), round_key(subject, "cpu"))


def has_adapters(config: VllmConfig) -> None:
    object.__setattr__(config, "lora_config", object())


def has_a_deeper_head(config: VllmConfig) -> None:
    assert config.speculative_config is not None
    config.speculative_config.draft_model_config.hf_text_config.num_hidden_layers = 2


@pytest.mark.parametrize(
    "change",
    [
        has_adapters,
        has_a_deeper_head,
        needs("attention_config", "backend", AttentionBackendEnum.FLASHINFER),
        needs("attention_config", "backend_per_kind", {"full_attention": AttentionBackendEnum.FLASHINFER}),
        needs("kernel_config", "moe_backend", "triton"),
        needs("parallel_config", "data_parallel_size", 2),
        needs("speculative_config", "num_speculative_tokens_per_batch_size", [[1, 1, 4], [2, 64, 1]]),
    ],
)
def test_a_record_belongs_to_the_configuration_that_was_tested(change: Any, gpu_config: Any) -> None:
    """Else a round that was never tested on this machine would be served."""
    config = gpu_config()
    before = record_of(config)
    assert record_of(config) == before  # the control
    change(config)
    assert record_of(config) != before


def test_a_record_belongs_to_the_variables_and_libraries_that_were_tested(
    gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = gpu_config(), set()
    for name, value in (("", ""), ("EAGLE_POLICY", "fixed"), ("EAGLE_LOOKUP", "on")):
        with monkeypatch.context() as patch:
            if name:
                patch.setenv(name, value)
            found.add(record_of(config))
    monkeypatch.setattr(record, "kernel_libraries", lambda: "flashinfer-python 9.9")
    assert len({*found, record_of(config)}) == 4


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"])
def test_modes_of_graphs_that_leave_attention_out(mode: str, gpu_config: Any) -> None:
    """vLLM makes PIECEWISE or NONE of them, since our backend is in no graph."""
    config = gpu_config()
    object.__setattr__(config.compilation_config, "cudagraph_mode", CUDAGraphMode[mode])
    assert unsupported.unsupported_reasons(config) == []
