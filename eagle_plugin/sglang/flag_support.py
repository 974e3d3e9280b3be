"""Says which flags of SGLang our worker does not serve, and why; the engine's own worker serves them."""

from __future__ import annotations

from typing import Any

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.sglang.caches import NAMES
from eagle_plugin.sglang.parallel_support import unsupported_flags_beside

# Flags: the values that we serve, and why the engine's own worker serves another one.
FLAGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("device", ("cpu", "cuda"), "only CPUs and NVIDIA GPUs are served"),
    ("tp_size", tuple(range(1, 9)), "at most 8 ranks are served"),
    ("nnodes", (1,), "ranks on several machines are not served yet"),
    ("pp_size", (1,), "pipeline parallelism is not served yet"),
    ("attn_dp_size", (None, *range(1, 9)), "at most 8 ranks are served"),
    ("attn_cp_size", (1, None), "context parallelism is not served yet"),
    ("dcp_size", (1, None), "context parallelism is not served yet"),
    ("moe_a2a_backend", ("none", None), "experts that get their tokens from other ranks are not served yet"),
    ("moe_dense_tp_size", (None,), "it gives the ranks different rows of a batch"),
    ("enable_attn_tp_input_scattered", (False, None), "it gives the ranks different rows of a batch"),
    ("enable_layernorm_sp", (False, None), "it gives the ranks different rows of a batch"),
    (
        "disaggregation_mode",
        ("null", None),
        "prefill/decode disaggregation is not served yet: none of its transfers runs on a CPU to show that it is right",
    ),
    ("enable_hierarchical_cache", (False, None), "the hierarchical cache is not served yet"),
    ("enable_lmcache", (False, None), "KV caches outside of the server's own pools are not served yet"),
    ("enable_flexkv", (False, None), "KV caches outside of the server's own pools are not served yet"),
    (
        "enable_unified_cache_external_linker",
        (False, None),
        "KV caches outside of the server's own pools are not served yet",
    ),
    ("radix_cache_backend", (None,), "only SGLang's own prefix cache is served"),
    ("enable_mixed_chunk", (False, None), "mixed chunked prefill is not served yet"),
    ("enable_two_batch_overlap", (False, None), "two-batch overlap is not served yet"),
    ("enable_pdmux", (False, None), "PD multiplexing is not served yet"),
    ("enable_lora_overlap_loading", (False, None), "LoRA adapters that are loaded beside rounds are not served yet"),
    (
        "kv_cache_dtype",
        ("auto", None, "bf16", "bfloat16", *NAMES),
        f"only the model's own dtype and {', '.join(NAMES)} are served",
    ),
    (
        "speculative_draft_kv_cache_dtype",
        ("auto", None, "bf16", "bfloat16", *NAMES),
        f"only the model's own dtype and {', '.join(NAMES)} are served",
    ),
    ("enable_page_major_kv_layout", (False, None), "only KV caches with one buffer per layer are served"),
    ("enable_unified_memory", (False, None), "only KV caches with one buffer per layer are served"),
    ("enable_kv_cache_sharding", (False, None), "only KV caches with one buffer per layer are served"),
    ("enable_hisparse", (False, None), "sparse attention is not served"),
    (
        "speculative_adaptive",
        (False, None),
        "without it the plugin serves, whose policy chooses the shape of every round",
    ),
    ("speculative_use_rejection_sampling", (False, None), "it belongs to the engine's chain worker"),
    ("speculative_accept_threshold_single", (1.0, None), "it changes the output's distribution"),
    ("speculative_accept_threshold_acc", (1.0, None), "it changes the output's distribution"),
    ("enable_return_routed_experts", (False, None), "it is part of the engine's own forward"),
    ("enable_return_indexer_topk", (False, None), "it is part of the engine's own forward"),
    ("enable_eplb", (False, None), "it is part of the engine's own forward"),
    ("elastic_ep_backend", (None, "none"), "only the engine's own forward goes on when a rank fails"),
    ("enable_elastic_expert_backup", (False, None), "only the engine's own forward goes on when a rank fails"),
    (
        "enable_nvidia_megakernel",
        (False, None),
        "its kernels take the place of the target's forward, and do not know the plugin's trees",
    ),
    (
        "kt_weight_path",
        (None,),
        "KTransformers keeps the memory of experts on a CPU for the batch sizes of the engine's own graphs alone",
    ),
    ("expert_distribution_recorder_mode", (None,), "it is part of the engine's own forward"),
    ("enable_symm_mem", (False, None), "the graphs of the plugin's rounds are not in the memory that it registers"),
    ("kv_canary", ("none", None), "it is part of the engine's own forward"),
    ("startup_weight_load_mode", ("serial", None), "the weights have to be there when graphs are captured and tested"),
    ("dwdp_size", (1, None), "distributed weights are not served yet"),
    ("enable_watermark", (False, None), "watermarking is not served yet"),
    ("enable_deterministic_inference", (False, None), "batch-invariant attention is not served yet"),
)
# Flags among them that not every tested release has.
NEWER = ("enable_nvidia_megakernel",)


def unsupported_flags(arguments: Any) -> list[str]:
    """Why our worker does not support these resolved server arguments; empty when it does."""
    reasons = []
    drafts = arguments.speculative_draft_kv_cache_dtype
    if arguments.device == "cpu" and drafts in NAMES:
        reasons.append(
            f"--speculative-draft-kv-cache-dtype {drafts} with --device cpu: only the model's own dtype is served there"
        )
    if arguments.speculative_draft_window_size is not None and arguments.speculative_algorithm == "EAGLE":
        reasons.append(
            f"--speculative-draft-window-size {arguments.speculative_draft_window_size}: it is served with EAGLE-3 and "
            "P-EAGLE heads"
        )
    if arguments.speculative_token_map is not None and arguments.speculative_algorithm == "EAGLE":
        # With EAGLE-3 heads, which have a map of their own, SGLang says that it ignores the flag.
        reasons.append(
            f"--speculative-token-map {arguments.speculative_token_map}: EAGLE-2 token maps are not served yet"
        )
    for name, served, why in FLAGS:
        if name in NEWER and not hasattr(arguments, name):
            continue
        value = getattr(arguments, name)
        if value not in served:
            reasons.append(f"--{name.replace('_', '-')} {value}: {why}")
    if arguments.device != "cpu" and arguments.forward_hooks:
        reasons.append("--forward-hooks: the plugin's rounds are captured after the hooks are set, and would hold them")
    reasons += unsupported_flags_beside(arguments)
    steps, topk = arguments.speculative_num_steps, arguments.speculative_eagle_topk
    width = arguments.speculative_num_draft_tokens
    if None not in (steps, topk, width):
        if width > MAX_WIDTH:
            reasons.append(f"--speculative-num-draft-tokens {width}: at most {MAX_WIDTH} nodes are served")
        if (steps - 1) * topk > MAX_WIDTH:
            reasons.append(
                f"--speculative-num-steps {steps} with --speculative-eagle-topk {topk}: "
                f"(steps - 1) * topk may be at most {MAX_WIDTH}"
            )
        if steps < 1 or width < 2:
            reasons.append(f"--speculative-num-steps {steps}, --speculative-num-draft-tokens {width}: nothing to draft")
    return reasons
