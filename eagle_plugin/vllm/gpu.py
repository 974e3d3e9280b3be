"""What of a configuration our worker does not serve on a GPU, beside what it serves nowhere.

What the GPU itself must have is asked in a process of its own (`selftest.launch`).
"""

from __future__ import annotations

from typing import Any

from eagle_plugin.runtime.startup import SWITCH, forced
from eagle_plugin.vllm.graph_modes import wants_graphs
from eagle_plugin.vllm.kv_connectors import planned_nixl


def head_dims(vllm_config: Any) -> list[int]:
    """The sizes of the heads of attention in both models; layers without a window may have another one (Gemma 4)."""
    models = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    wide = [getattr(model.hf_text_config, "global_head_dim", None) for model in models]
    return [model.get_head_size() for model in models] + [size for size in wide if size]


def unsupported_on_gpu(vllm_config: Any) -> list[str]:
    """Why our worker does not serve this ``VllmConfig`` on a GPU; empty where it does."""
    from vllm import envs

    model = vllm_config.model_config
    offload = vllm_config.offload_config
    odd = [size for size in head_dims(vllm_config) if size % 16]
    checks: tuple[tuple[bool, str], ...] = (
        # Nothing says yet that it is not slower than what vLLM has there.
        (not forced(), f"GPUs: no GPU has run the plugin's worker for vLLM yet; {SWITCH}=force tries it"),
        (envs.VLLM_USE_BREAKABLE_CUDAGRAPH, "VLLM_USE_BREAKABLE_CUDAGRAPH: it is not served yet"),
        (
            envs.VLLM_USE_NCCL_SYMM_MEM and vllm_config.parallel_config.tensor_parallel_size > 1,
            "VLLM_USE_NCCL_SYMM_MEM: the plugin's graphs are not in the memory that it registers",
        ),
        (
            envs.VLLM_LOG_BATCHSIZE_INTERVAL >= 0,
            "VLLM_LOG_BATCHSIZE_INTERVAL: it waits for the GPU inside of the forwards that the plugin captures",
        ),
        (envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT: batch-invariant attention is not served yet"),
        (
            # vLLM's own steps have graphs there, ours have none (`capture.py`).
            vllm_config.parallel_config.data_parallel_size > 1 and model.is_moe and wants_graphs(vllm_config),
            f"--data-parallel-size with target {model.architectures[0]}: engines that share experts draft without the "
            "plugin's graphs yet; with --enforce-eager it is served",
        ),
        (
            # vLLM's own caches have the layout LBHNC with NIXL, of which a rank can read some heads of another. Whether
            # the other server has as many ranks is not known here; who names our layout has none of it in vLLM either.
            (nixl := planned_nixl(vllm_config)) is not None and envs.VLLM_KV_CACHE_LAYOUT is None,
            f"{nixl}: the plugin's KV caches have the layout LBNHC, which NIXL exchanges between servers of the same "
            "--tensor-parallel-size only; where they are, it is served with VLLM_KV_CACHE_LAYOUT=LBNHC on both",
        ),
        (vllm_config.parallel_config.use_ubatching, "--enable-dbo: dual batch overlap is not served yet"),
        (
            vllm_config.observability_config.jit_monitor_mode == "error",
            "--jit-monitor-mode error: kernels for trees are compiled when they are first used",
        ),
        (
            offload.offload_backend != "uva" and offload.prefetch.offload_group_size > 0,
            "--offload-group-size: weights that are fetched layer by layer are not served in the plugin's graphs yet",
        ),
        (model.enable_sleep_mode, "--enable-sleep-mode: it is served on CPUs only"),
        (
            model.is_hybrid and vllm_config.cache_config.enable_prefix_caching,
            f"target {model.architectures[0]} with prefix caching: the plugin keeps one state of a linear layer per "
            "request, which has no prefixes, and vLLM's own drafts have them on GPUs; --no-enable-prefix-caching is "
            "served",
        ),
        (model.rswa_window is not None, f"target {model.architectures[0]}: reference windows are not served yet"),
        (bool(odd), f"head_dim {', '.join(map(str, odd))}: only multiples of 16 are served on a GPU"),
    )
    return [why for found, why in checks if found]
