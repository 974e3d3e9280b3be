"""What our worker does not serve of targets with latent attention (MLA)."""

from __future__ import annotations

from typing import Any

import torch

from eagle_plugin.vllm.graph_modes import is_compiled


def unserved_latent(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """What holds of this ``VllmConfig`` and keeps our worker from a target with latent attention, each with its
    sentence; empty for other targets."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    if not model.use_mla:
        return ()
    target = f"target {model.architectures[0]}"
    own = str(model.dtype).removeprefix("torch.")
    on_cpu = vllm_config.device_config.device_type == "cpu"
    asked = getattr(vllm_config.attention_config.backend, "name", None)
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    return (
        (not on_cpu, f"{target}: latent (MLA) attention is served on CPUs only yet"),
        (
            # vLLM takes its AMX kernels then, with a cache and weights in an order of their own.
            on_cpu and asked != "CPU_MLA" and torch.cpu._is_amx_tile_supported(),
            f"{target}: latent (MLA) attention by vLLM's AMX kernels is not served yet; with --attention-backend "
            "CPU_MLA it is",
        ),
        (
            # vLLM's other embeddings rotate rows of `query` in place and take its strides for others on a CPU: what a
            # request gets depends on the requests beside it.
            on_cpu and not _has_yarn(rope),
            f"{target}: rotary embedding {rope.get('rope_type')} of latent (MLA) attention is not served on CPUs, as "
            "vLLM rotates wrong rows by it there and plain text depends on the batch; YaRN is served",
        ),
        (
            hasattr(model.hf_text_config, "index_topk"),
            f"{target}: sparse latent (DSA) attention is not served yet",
        ),
        (
            cache.cache_dtype not in ("auto", own),
            f"--kv-cache-dtype {cache.cache_dtype}: it is not served with latent (MLA) attention yet",
        ),
        (
            # Texts of a target with experts are not those of plain decoding then, and it is not known why.
            is_compiled(vllm_config),
            f"{target}: latent (MLA) attention is served without torch.compile only yet; with --enforce-eager it is",
        ),
        (parallel.tensor_parallel_size > 1, f"--tensor-parallel-size: it is not served with {target} yet"),
        (bool(vllm_config.lora_config), f"--enable-lora: it is not served with {target} yet"),
        (model.is_multimodal_model, f"{target}: latent (MLA) attention of multimodal models is not served yet"),
    )


def schedule_whole_prompts(vllm_config: Any) -> None:
    """Let a step have room for the longest prompt of a target with latent attention.

    On a CPU vLLM switches chunked prefill off for it and makes ``max_num_batched_tokens`` as large as a prompt can be,
    but with drafts it has taken the scheduler's limit from the value before: a longer prompt would wait for ever.
    """
    scheduler = vllm_config.scheduler_config
    if vllm_config.model_config.use_mla and not scheduler.enable_chunked_prefill:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens


def _has_yarn(rope: dict[str, Any]) -> bool:
    """Whether vLLM takes its embedding "deepseek_yarn" for these ``rope_parameters``."""
    return "yarn" in rope.get("rope_type", "default") and rope.get("attention_factor") != 1.0
