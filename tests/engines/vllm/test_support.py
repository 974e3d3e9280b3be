"""Who serves a configuration: what the plugin leaves to vLLM with a word, what it refuses, and how to switch it off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_cpu_experts
from family_models import family_head, family_target
from head_edits import config
from trained_heads import trained_head
from vllm.config import ECTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.executor.abstract import Executor
from vllm_configs import DEFAULTS, configure

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.export import save_head
from eagle_plugin.vllm import plugin, plugin_config
from eagle_plugin.vllm.draft_limits import draft_limits
from eagle_plugin.vllm.executor import TreeExecutor
from eagle_plugin.vllm.masked_rows import mask_token
from eagle_plugin.vllm.unsupported import ENGINE_WORKERS, WORKERS, unsupported_reasons

pytestmark = pytest.mark.usefixtures("lines")


def untouched(config: VllmConfig) -> bool:
    parallel, ours = config.parallel_config, plugin_config.is_served(config.speculative_config)
    own = parallel.worker_cls == ENGINE_WORKERS["cpu"] and parallel.distributed_executor_backend != TreeExecutor
    return own and not ours


# ---------------------------------------------------------------------------------------------------------------------
# Served, switched off


def test_a_plain_configuration_is_served(target: Path, head: Path, lines: list[str]) -> None:
    config = configure(target, head, additional_config={"eagle_plugin": {"depth": 2, "topk": 3}})
    assert config.parallel_config.worker_cls == WORKERS["cpu"]
    assert plugin_config.caps_of(config.speculative_config) == Shape(2, 3, 8)
    assert not config.scheduler_config.async_scheduling
    assert lines == []
    eager = configure(target, head, additional_config={"eagle_plugin": {"async_scheduling": True}})
    assert eager.scheduler_config.async_scheduling


@pytest.mark.parametrize(("depth", "topk", "slots"), [(2, 3, 7), (7, 2, 12), (7, 1, 7), (4, 8, 24)])
def test_slots_are_reserved_for_deep_drafts(
    depth: int, topk: int, slots: int, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a request's tokens, as many as its drafts write: what schedules and warms up reads this number."""
    given = {"eagle_plugin": {"depth": depth, "topk": topk}}
    assert configure(target, head, additional_config=given).num_lookahead_tokens == slots
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    assert configure(target, head, additional_config=given).num_lookahead_tokens == 7


def test_limits_by_batch_size(target: Path, head: Path, lines: list[str]) -> None:
    """vLLM's own number of drafted tokens by batch size limits the trees; what it names above them changes nothing."""
    name = "num_speculative_tokens_per_batch_size"
    made = configure(target, head, speculative={name: [[1, 2, 7], [4, 8, 2]]}, max_num_seqs=9)
    assert plugin_config.is_served(made.speculative_config) and lines == []
    limits = draft_limits(made)
    assert limits is not None and limits[1:10] == [7, 7, 7, 2, 2, 2, 2, 2, 2]
    assert draft_limits(configure(target, head)) is None
    configure(target, head, speculative={name: [[1, 2, 9]]})
    assert [line.partition(": ")[2] for line in lines] == [
        f"{name} has 9 drafted tokens for 1 to 2 requests, num_speculative_tokens is 7: trees have at most 7 there too"
    ]
    for wrong in ([[4, 2, 1]], [], [[2, 3, 1]]):
        with pytest.raises(UserError, match=rf"{name} is .*; wanted a list of \[first batch size, last batch size, "):
            configure(target, head, speculative={name: wrong})


def test_the_executor_of_a_worker_process_is_ours(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the worker is in vLLM's own process, a call of it costs nothing."""
    assert configure(target, head).parallel_config.distributed_executor_backend == "uni"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = configure(target, head)
    assert Executor.get_class(config) is TreeExecutor


def test_connectors_of_encoder_caches_find_the_executor_that_they_know(target: Path, head: Path) -> None:
    """They count one report of each rank where its name is "mp"."""
    connector = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    config = configure(target, head, tensor_parallel_size=2, ec_transfer_config=connector)
    assert config.parallel_config.worker_cls == WORKERS["cpu"]
    assert config.parallel_config.distributed_executor_backend == "mp"


def test_several_ranks_are_served(target: Path, head: Path) -> None:
    config = configure(target, head, tensor_parallel_size=2)
    assert config.parallel_config.worker_cls == WORKERS["cpu"]
    assert Executor.get_class(config) is TreeExecutor


@pytest.mark.parametrize("speculative", [{}, {"parallel_drafting": True}], ids=["", "parallel_drafting"])
def test_a_p_eagle_head_is_served(speculative: dict[str, Any], target: Path, tmp_path: Path, lines: list[str]) -> None:
    """With the flag of vLLM's own drafting, which would take room of every step, or without it."""
    save_head(trained_head("peagle", target, mask_token_id=2), tmp_path / "head", target_dir=target)
    made = configure(target, tmp_path / "head", speculative=speculative)
    assert made.parallel_config.worker_cls == WORKERS["cpu"]
    assert plugin_config.caps_of(made.speculative_config) == Shape(7, 4, 8)
    assert mask_token(made.speculative_config) == 2
    assert not made.speculative_config.parallel_drafting
    assert made.speculative_config.max_num_new_slots_for_drafting == 0
    assert lines == []


@pytest.mark.parametrize("is_async", [False, True])
def test_trees_have_no_more_levels_than_a_head_was_trained_for(
    is_async: bool, target: Path, tmp_path: Path, lines: list[str]
) -> None:
    training = {"recipe": {"phases": [{"steps": 1}, {"steps": 2}]}}
    head = trained_head("peagle", target, mask_token_id=2)
    save_head(head, tmp_path / "head", target_dir=target, manifest={"training": training})
    chosen = configure(target, tmp_path / "head")
    assert plugin_config.caps_of(chosen.speculative_config) == Shape(2, 4, 8) and lines == []
    options = {"depth": 5, "topk": 2, "async_scheduling": is_async}
    deep = configure(target, tmp_path / "head", additional_config={"eagle_plugin": options})
    assert plugin_config.caps_of(deep.speculative_config) == Shape(2, 2, 7)
    (line,) = lines
    assert "was trained to draft 2 tokens in one forward, so its trees have 2 levels and not 5" in line


def test_other_methods_and_none_are_not_ours(target: Path, lines: list[str]) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    for options in ({"speculative_config": ngram}, {}):
        config = EngineArgs(model=str(target), **DEFAULTS, **options).create_engine_config()
        assert untouched(config) and lines == []


def test_switched_off(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """After an engine of this process was served: the hooks are there and do nothing, whatever the options say."""
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    assert untouched(configure(target, head, additional_config={"eagle_plugin": {"depth": 99}})) and lines == []


def test_served_requests_may_have_what_vllm_refuses_beside_drafts(target: Path, head: Path) -> None:
    asked = SamplingParams(min_p=0.1, logit_bias={3: 1.0})
    asked._validate_spec_decode(configure(target, head).speculative_config)
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        asked._validate_spec_decode(configure(target, head, kv_cache_dtype="int8_per_token_head").speculative_config)


# ---------------------------------------------------------------------------------------------------------------------
# Served by vLLM itself, with the reason named


def unsupported(config: VllmConfig, lines: list[str], named: str) -> None:
    assert untouched(config)
    (line,) = lines
    assert "eagle3 is served by vLLM's own worker: " in line and named in line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_cache_dtype": "fp8_per_token_head"}, "--kv-cache-dtype fp8_per_token_head: only the model's own"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4: only"),
        ({"kv_cache_dtype": "fp8", "speculative": {"kv_cache_dtype": "auto"}}, "kv_cache_dtype auto of the head: only"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, "--kv-cache-dtype-skip-layers: "),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "--pipeline-parallel-size"),
        ({"kv_transfer_config": {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}}, "MooncakeConnector has"),
    ],
)  # fmt: skip
def test_unsupported_flags(options: dict[str, Any], named: str, target: Path, head: Path, lines: list[str]) -> None:
    unsupported(configure(target, head, **options), lines, named)


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("disable_padded_drafter_batch", True, False),
        ("use_local_argmax_reduction", True, False),
        ("rejection_sample_method", "block", "standard"),
    ],
)
def test_options_of_chains_are_dropped(
    name: str, value: Any, default: Any, target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM's own worker serves they stay."""
    served = configure(target, head, speculative={name: value})
    assert served.parallel_config.worker_cls == WORKERS["cpu"] and getattr(served.speculative_config, name) == default
    (line,) = lines
    assert name in line and line.endswith("dropped, because it belongs to vLLM's chains and changes no text")
    left = configure(target, head, speculative={name: value}, kv_cache_dtype="fp8_per_token_head")
    assert untouched(left) and getattr(left.speculative_config, name) == value


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2", "auto"])
def test_caches_that_are_served(name: str, target: Path, head: Path, lines: list[str]) -> None:
    made = configure(target, head, kv_cache_dtype=name, speculative={"kv_cache_dtype": name})
    assert made.parallel_config.worker_cls == WORKERS["cpu"] and lines == []


def test_scales_per_head_are_unsupported(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(target, head, kv_cache_dtype="fp8")
    assert unsupported_reasons(made) == []
    made.model_config.hf_config.quantization_config = {"kv_cache_scheme": {"strategy": "attn_head"}}
    (reason,) = unsupported_reasons(made)
    assert "scales per head of its KV cache are not served yet" in reason


def test_another_worker_is_unsupported(target: Path, head: Path, lines: list[str]) -> None:
    config = configure(target, head, worker_cls="some.other.Worker")
    assert config.parallel_config.worker_cls == "some.other.Worker"
    assert "--worker-cls some.other.Worker: it is not vLLM's own" in lines[0]


def test_a_p_eagle_head_of_another_class_is_unsupported(target: Path, tmp_path: Path, lines: list[str]) -> None:
    """vLLM's own worker gets the flag as it was given."""
    save_head(trained_head("peagle", target, mask_token_id=2), tmp_path / "head", target_dir=target)
    config(architectures=["Eagle3DeepseekV2ForCausalLM"])(tmp_path / "head")
    made = configure(target, tmp_path / "head", speculative={"parallel_drafting": True})
    unsupported(made, lines, "draft head Eagle3DeepseekV2ForCausalLM: not one of")
    assert made.speculative_config.parallel_drafting


@pytest.mark.parametrize(
    ("part", "attribute", "value", "named"),
    [
        ("device_config", "device_type", "tpu", "--device tpu: only CPUs and NVIDIA GPUs are served"),
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("parallel_config", "prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("parallel_config", "enable_eplb", True, "--enable-eplb"),
        ("parallel_config", "nnodes", 2, "--nnodes"),
        ("speculative_config", "use_heterogeneous_vocab", True, "use_heterogeneous_vocab"),
        ("speculative_config", "rejection_sample_method", "fly", "rejection_sample_method fly"),
    ],
)
def test_settings_that_this_configuration_cannot_have(
    part: str, attribute: str, value: Any, named: str, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    config = configure(target, head)
    assert unsupported_reasons(config) == []
    object.__setattr__(getattr(config, part), attribute, value)
    (reason,) = unsupported_reasons(config)
    assert named in reason


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2, "enable_lora": True}, {"data_parallel_size": 2}])
def test_ranks_that_are_served(options: dict[str, Any], target: Path, head: Path, lines: list[str]) -> None:
    made = configure(target, head, **options)
    assert made.parallel_config.worker_cls == WORKERS["cpu"] and lines == []
    ours = plugin_config.plugin_config(made.speculative_config)
    assert ours is not None and ours.engines == options.get("data_parallel_size", 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size: the experts of target Qwen3MoeForCausalLM get tokens of"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "--enable-expert-parallel: vLLM's experts on a CPU",
        ),
    ],
)
def test_experts_that_vllm_does_not_share_on_a_cpu(
    options: dict[str, Any], named: str, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM has what it lacks, our worker serves them."""
    target = family_target(tmp_path / "target", "qwen3_moe")
    head = family_head(tmp_path / "head", target)
    unsupported(configure(target, head, **options), lines, named)
    vllm_cpu_experts.complete(monkeypatch)
    assert configure(target, head, **options).parallel_config.worker_cls == WORKERS["cpu"]
    other = configure(target, head, **options | {"data_parallel_size": 2}, all2all_backend="deepep_low_latency")
    assert untouched(other) and "--all2all-backend deepep_low_latency: only" in lines[-1]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("use_mla", "MLA"),
        ("is_hybrid", "state-space"),
        ("is_attention_free", "state-space"),
        ("is_encoder_decoder", "encoder-decoder"),
        ("is_mm_prefix_lm", "both directions"),
    ],
)
def test_kinds_of_targets(name: str, named: str, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # MLA has one more reason with it
    config = configure(target, head)
    vars(config.model_config).pop(name, None)  # a property may be cached
    monkeypatch.setattr(type(config.model_config), name, True)
    (reason,) = unsupported_reasons(config)
    assert reason.startswith("target LlamaForCausalLM: ") and named in reason


# ---------------------------------------------------------------------------------------------------------------------
# The entry point


def test_a_hook_is_put_where_the_method_is_defined() -> None:
    """The class of a GPU's platform inherits the method that chooses the worker."""

    class Base:
        @classmethod
        def chosen(cls) -> str:
            return cls.__name__

    class Platform(Base):
        pass

    plugin._wrap(Platform, "chosen", lambda original, owner: f"ours over {original(owner)}")
    plugin._wrap(Platform, "chosen", lambda original, owner: "twice")
    assert Platform.chosen() == "ours over Platform" and "chosen" not in Platform.__dict__


def test_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    before = CpuPlatform.__dict__["check_and_update_config"], SamplingParams._validate_spec_decode
    plugin.register()
    assert (CpuPlatform.__dict__["check_and_update_config"], SamplingParams._validate_spec_decode) == before
    for hooked in (before[0].__func__, before[1]):
        assert not hasattr(getattr(hooked, plugin._MARK), plugin._MARK)


@pytest.mark.parametrize("version", ["0.31.2", "0.32.1", "0.34.0+cpu"])
def test_another_version_is_left_untouched(version: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    wrapped: list[Any] = []
    monkeypatch.setattr(plugin, "_wrap", lambda *hook: wrapped.append(hook))
    monkeypatch.setattr(plugin.version, "installed", lambda: version)
    plugin.register()
    assert not wrapped
    assert version in lines[0] and plugin.version.TESTED[0] in lines[0]


@pytest.mark.parametrize(("value", "hooks"), [("0", 0), ("1", 7)])
def test_the_environment_variable(value: str, hooks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[Any] = []
    monkeypatch.setattr(plugin, "_wrap", lambda *hook: wrapped.append(hook))
    monkeypatch.setenv("EAGLE_PLUGIN", value)
    plugin.register()
    assert len(wrapped) == hooks
