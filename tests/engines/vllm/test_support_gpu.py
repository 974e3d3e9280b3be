"""Which configurations of vLLM are served on a GPU, of which a process of its own has told."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, KVTransferConfig, PrefetchOffloadConfig, VllmConfig
from vllm.config import vllm as vllm_config_module
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_configs import configure, needs

from eagle_plugin.common import keyed_json
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.selftest import record
from eagle_plugin.selftest.launch import ANSWERED, Answer
from eagle_plugin.selftest.shapes import ModelShape
from eagle_plugin.selftest.subject import Subject, round_key
from eagle_plugin.vllm import plugin, plugin_config, selftest, support, unsupported

pytestmark = pytest.mark.usefixtures("lines")


@pytest.fixture
def gpu_config(target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the configuration of a GPU as it is when the plugin sees it."""
    plugin.register()  # vLLM does it with the first configuration, unless the plugin is switched off

    def make(**options: Any) -> VllmConfig:
        monkeypatch.setenv("EAGLE_PLUGIN", "0")
        made = configure(target, head, **options)
        monkeypatch.setenv("EAGLE_PLUGIN", "force")
        monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
        object.__setattr__(made.device_config, "device_type", "cuda")
        made.parallel_config.worker_cls = unsupported.ENGINE_WORKERS["cuda"]
        made.scheduler_config.async_scheduling = True
        lines.clear()  # that the plugin is switched off
        return made

    return make


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[Subject]:
    """Answers for the process; the subjects that it was asked about."""
    asked: list[Subject] = []
    monkeypatch.setenv(ANSWERED, "{}")  # so that what is answered ends with the test
    monkeypatch.setattr(selftest, "ask", lambda subject: asked.append(subject) or answer)
    return asked


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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (needs("parallel_config", "enable_dbo", True), "--enable-dbo: "),
        (needs("offload_config", "prefetch", PrefetchOffloadConfig(offload_group_size=8)), "--offload-group-size: "),
        (needs("model_config", "enable_sleep_mode", True), "--enable-sleep-mode: "),
        (needs("observability_config", "jit_monitor_mode", "error"), "--jit-monitor-mode error: "),
        (needs("parallel_config", "worker_cls", "some.other.Worker"), "--worker-cls some.other.Worker: "),
    ],
)
def test_what_a_gpu_does_not_serve(change: Any, named: str, gpu_config: Any) -> None:
    config = gpu_config()
    assert unsupported.unsupported_reasons(config) == []
    change(config)
    (reason,) = unsupported.unsupported_reasons(config)
    assert reason.startswith(named)


def test_a_head_in_several_groups_of_caches_is_left_to_vllm(gpu_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a block drafter of 8 layers for GPT-OSS 20B: vLLM's V2 model runner serves it, V1 does not."""
    config = gpu_config()
    kinds = ["sliding_attention", "full_attention"] * 12
    needs("model_config", "hf_text_config", SimpleNamespace(layer_types=kinds))(config)
    text = config.speculative_config.draft_model_config.hf_text_config
    monkeypatch.setattr(text, "num_hidden_layers", 4)
    assert not [reason for reason in unsupported.unsupported_reasons(config) if "groups" in reason]
    monkeypatch.setattr(text, "num_hidden_layers", 8)
    (reason,) = [reason for reason in unsupported.unsupported_reasons(config) if "groups" in reason]
    assert reason.startswith("draft head ") and "--disable-hybrid-kv-cache-manager it is served" in reason
    needs("scheduler_config", "disable_hybrid_kv_cache_manager", True)(config)
    assert not [reason for reason in unsupported.unsupported_reasons(config) if "groups" in reason]


def test_layers_with_larger_heads_are_the_devices_business_too(
    gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Gemma 4, whose texts alone would be served: vLLM gives our backend no layer of 512 numbers per head."""
    asked = answering(monkeypatch, Answer(["head_dim 512: at most 256 is served on a GPU"], []))
    config = gpu_config()
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", True)
    advice = "with --language-model-only its texts are"
    assert [advice in reason for reason in unsupported.unsupported_reasons(config)] == [True]
    config.model_config.hf_text_config.update({"global_head_dim": 512})
    assert [advice in reason for reason in unsupported.unsupported_reasons(config)] == [False]
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", False)
    support.choose_worker(config)
    assert asked[0].head_dims == [32, 32, 512] and not plugin_config.is_served(config.speculative_config)


@pytest.mark.parametrize(
    ("connector", "more", "named"),
    [
        ("NixlConnector", {}, "NixlConnector: "),
        ("NixlPushConnector", {}, "NixlPushConnector: "),
        ("MultiConnector", {"connectors": [{"kv_connector": "NixlConnector"}]}, "NixlConnector: "),
        ("OffloadingConnector", {}, ""),
    ],
)
def test_nixl_is_served_by_our_layout_where_the_user_names_it(
    connector: str, more: dict[str, Any], named: str, gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own layout servers of different tensor parallelism exchange caches; by ours requests would fail."""
    config = gpu_config()
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=more)
    object.__setattr__(config, "kv_transfer_config", transfer)
    reasons = unsupported.unsupported_reasons(config)
    assert len(reasons) == bool(named) and all(reason.startswith(named) for reason in reasons)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert unsupported.unsupported_reasons(config) == []


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("is_moe", [True, False])
def test_engines_that_share_experts_have_no_graphs_of_ours(
    is_moe: bool, eager: bool, gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own have: without graphs on both sides there is nothing to lose."""
    config = gpu_config(enforce_eager=eager)
    needs("compilation_config", "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)(config)
    monkeypatch.setattr(type(config.model_config), "is_moe", is_moe)
    assert unsupported.unsupported_reasons(config) == []
    needs("parallel_config", "data_parallel_size", 2)(config)
    reasons = unsupported.unsupported_reasons(config)
    named = ["--data-parallel-size with target LlamaForCausalLM"] if is_moe and not eager else []
    assert [reason.partition(": ")[0] for reason in reasons] == named


@pytest.mark.parametrize(("name", "value"), [("VLLM_USE_NCCL_SYMM_MEM", "1"), ("VLLM_LOG_BATCHSIZE_INTERVAL", "60")])
def test_variables_that_captures_do_not_bear(
    name: str, value: str, gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpu_config(tensor_parallel_size=4)
    assert unsupported.unsupported_reasons(config) == []
    monkeypatch.setenv(name, value)
    (reason,) = unsupported.unsupported_reasons(config)
    assert reason.startswith(f"{name}: ")


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


def test_linear_layers_with_prefix_caching_are_left_to_vllm(gpu_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own drafts have both on a GPU; a CPU's server would run without prefix caching."""
    config = gpu_config()
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    monkeypatch.setattr(unsupported, "GATED_DELTA_NETS", ("LlamaForCausalLM",))
    assert config.cache_config.enable_prefix_caching
    (reason,) = unsupported.unsupported_reasons(config)
    assert reason.startswith("target LlamaForCausalLM with prefix caching: ")
    assert reason.endswith("; --no-enable-prefix-caching is served")
    config.cache_config.enable_prefix_caching = False
    assert unsupported.unsupported_reasons(config) == []


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


def test_weights_that_the_gpu_reads_from_the_host_are_served(gpu_config: Any) -> None:
    """vLLM ignores the groups where the backend is the other one."""
    config = gpu_config()
    needs("offload_config", "prefetch", PrefetchOffloadConfig(offload_group_size=8))(config)
    needs("offload_config", "offload_backend", "uva")(config)
    assert unsupported.unsupported_reasons(config) == []


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "VLLM_USE_BREAKABLE_CUDAGRAPH"])
def test_what_a_gpu_does_not_serve_by_variable(name: str, gpu_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_config()
    monkeypatch.setenv(name, "1")
    (reason,) = unsupported.unsupported_reasons(config)
    assert reason.startswith(f"{name}: ")


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"])
def test_modes_of_graphs_that_leave_attention_out(mode: str, gpu_config: Any) -> None:
    """vLLM makes PIECEWISE or NONE of them, since our backend is in no graph."""
    config = gpu_config()
    object.__setattr__(config.compilation_config, "cudagraph_mode", CUDAGraphMode[mode])
    assert unsupported.unsupported_reasons(config) == []
