"""What is left to vLLM's own worker on a GPU, and served elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, KVTransferConfig, PrefetchOffloadConfig
from vllm_configs import answering, needs

from eagle_plugin.selftest.launch import Answer
from eagle_plugin.vllm import plugin_config, support, unsupported

pytestmark = pytest.mark.usefixtures("lines")


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
