"""Which flags of SGLang our worker serves, and which it leaves to the engine's own, with the flag named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
from sglang_flags import SERVED

from eagle_plugin.sglang import parallel_support, version
from eagle_plugin.sglang.flag_support import FLAGS, NEWER, unsupported_flags


def draft_config(architecture, **keys):
    return SimpleNamespace(architectures=[architecture], **keys)


def test_the_usual_flags_are_served():
    assert unsupported_flags(SimpleNamespace(**SERVED)) == []
    assert unsupported_flags(SimpleNamespace(**(SERVED | {"tp_size": 8}))) == []


def test_a_draft_window_is_served_with_eagle3_heads():
    flags = SERVED | {"speculative_draft_window_size": 512}
    assert unsupported_flags(SimpleNamespace(**flags)) == []
    (reason,) = unsupported_flags(SimpleNamespace(**(flags | {"speculative_algorithm": "EAGLE"})))
    assert "--speculative-draft-window-size 512" in reason


def test_a_token_map_is_left_to_the_engine_where_it_reads_one():
    """With EAGLE-3 heads SGLang ignores the flag, with a warning."""
    flags = SERVED | {"speculative_token_map": "map.pt"}
    assert unsupported_flags(SimpleNamespace(**flags)) == []
    (reason,) = unsupported_flags(SimpleNamespace(**(flags | {"speculative_algorithm": "EAGLE"})))
    assert reason.startswith("--speculative-token-map map.pt: ")


def test_a_cache_of_the_head_in_the_dtype_of_the_model():
    for name in ("bf16", "bfloat16"):
        assert unsupported_flags(SimpleNamespace(**(SERVED | {"speculative_draft_kv_cache_dtype": name}))) == []


def test_data_parallel_attention_is_served_without_adapters(monkeypatch):
    replicas = SERVED | {"tp_size": 2, "attn_dp_size": 2}
    assert unsupported_flags(SimpleNamespace(**replicas)) == []
    (reason,) = unsupported_flags(SimpleNamespace(**(replicas | {"tp_size": 4})))
    assert "--tp-size 4 with --attn-dp-size 2" in reason
    (reason,) = unsupported_flags(SimpleNamespace(**(replicas | {"enable_lora": True})))
    assert "--enable-lora with --attn-dp-size 2" in reason
    monkeypatch.setenv("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "1")
    assert unsupported_flags(SimpleNamespace(**SERVED)) == []
    (reason,) = unsupported_flags(SimpleNamespace(**replicas))
    assert "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION" in reason


@pytest.mark.parametrize(
    ("head", "output_ranks", "named"),
    [
        (draft_config("LlamaForCausalLMEagle3", draft_vocab_size=64), 2, None),
        (draft_config("LlamaForCausalLMEagle3", tie_word_embeddings=True), 2, None),
        (draft_config("LlamaForCausalLMEagle3"), 2, "--enable-dp-lm-head"),
        (draft_config("LlamaForCausalLMEagle3"), 1, None),
        (draft_config("LlamaForCausalLMEagle", draft_vocab_size=64), 1, "an EAGLE-3 head is served"),
    ],
)
def test_heads_that_are_served_with_data_parallel_attention(head, output_ranks, named, monkeypatch):
    """output_ranks: among how many the target's output layer is divided, where each serves other requests."""
    from sglang.srt import runtime_context

    parallel = SimpleNamespace(tp_size=2, attn_tp_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda model: None)
    target = SimpleNamespace(model=SimpleNamespace(lm_head=SimpleNamespace(tp_size=output_ranks)), model_config=None)
    flags, draft = SimpleNamespace(attn_dp_size=2), SimpleNamespace(hf_config=head)
    reasons = parallel_support.unsupported_models_beside(flags, target, draft)
    assert [named in reason for reason in reasons] == [True] * (named is not None)
    assert not parallel_support.unsupported_models_beside(SimpleNamespace(attn_dp_size=1), target, draft)


def test_every_flag_is_one_of_the_engines():
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.server_args import ServerArgs

    arguments = resolved_view(ServerArgs(model_path="unread"))
    # A value that the engine resolves later (the device, the shape) is not known yet; the names are.
    missing = {name for name, _, _ in FLAGS if not hasattr(arguments, name)}
    assert missing == (set() if version.installed() == version.TESTED[-1] else set(NEWER))


def test_a_flag_of_a_newer_release_is_not_missed_in_an_older_one():
    (flag,) = NEWER
    (reason,) = unsupported_flags(SimpleNamespace(**(SERVED | {flag: True})))
    assert reason.startswith("--enable-nvidia-megakernel True: ")
    older = {name: value for name, value in SERVED.items() if name != flag}
    assert unsupported_flags(SimpleNamespace(**older)) == []


def test_forward_hooks_are_left_to_the_engine_where_rounds_are_captured():
    hooks = SERVED | {"forward_hooks": [{"target_modules": ["*"]}]}
    assert unsupported_flags(SimpleNamespace(**hooks)) == []
    (reason,) = unsupported_flags(SimpleNamespace(**(hooks | {"device": "cuda"})))
    assert reason.startswith("--forward-hooks: ")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("device", "xpu"),
        ("tp_size", 16),
        ("nnodes", 2),
        ("attn_cp_size", 2),
        ("dcp_size", 2),
        ("moe_a2a_backend", "deepep"),
        ("moe_dense_tp_size", 1),
        ("enable_layernorm_sp", True),
        ("elastic_ep_backend", "mooncake"),
        ("enable_elastic_expert_backup", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("enable_unified_cache_external_linker", True),
        ("radix_cache_backend", "flexkv"),
        ("enable_lora_overlap_loading", True),
        ("kv_cache_dtype", "mxfp8"),
        ("speculative_draft_kv_cache_dtype", "fp8_e4m3"),  # with --device cpu
        ("speculative_draft_kv_cache_dtype", "nvfp4"),
        ("speculative_adaptive", True),
        ("speculative_accept_threshold_single", 0.5),
        ("speculative_num_draft_tokens", 65),
        ("speculative_num_steps", 18),  # (18 - 1) * 4 draft slots do not fit a 64-bit bitmask
    ],
)
def test_other_flags_are_left_to_the_engine_with_the_flag_named(flag, value):
    reasons = unsupported_flags(SimpleNamespace(**(SERVED | {flag: value})))
    assert len(reasons) == 1
    assert flag.replace("_", "-") in reasons[0] and str(value) in reasons[0]


@pytest.mark.parametrize("value", ["fp8_e4m3", "fp8_e5m2"])
def test_caches_of_8_bit_floats_are_served_on_gpus(value):
    flags = {"device": "cuda", "kv_cache_dtype": value, "speculative_draft_kv_cache_dtype": value}
    assert unsupported_flags(SimpleNamespace(**(SERVED | flags))) == []
