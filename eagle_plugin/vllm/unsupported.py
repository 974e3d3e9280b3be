"""Why the plugin's worker does not serve a configuration of vLLM, each reason with its sentence."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from vllm.v1.worker.gpu.sample.logits_processor.loader import LOGITSPROCS_GROUP

from eagle_plugin.runtime.gpu import MAX_HEAD_DIM
from eagle_plugin.vllm.block_support import unlisted_by_v1, unserved_heads
from eagle_plugin.vllm.cache_dtypes import FLOAT8
from eagle_plugin.vllm.gpu import head_dims, unsupported_on_gpu
from eagle_plugin.vllm.kv_connectors import connector_flag, planned_transfer, unserved_connectors
from eagle_plugin.vllm.latent_limits import unserved_latent
from eagle_plugin.vllm.parallel_support import unserved_ranks

# By the kind of device: vLLM's own worker, and ours.
ENGINE_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
WORKERS = {
    "cpu": "eagle_plugin.vllm.cpu_worker.TreeCPUWorker",
    "cuda": "eagle_plugin.vllm.worker.TreeWorker",
}
# Methods of vLLM's scheduler that get the drafts of a step; `plugin.py` wraps them.
DRAFTS_ARRIVE = ("update_draft_token_ids", "update_draft_token_ids_in_output")
# Targets with linear layers that our worker computes.
GATED_DELTA_NETS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
LAYOUTS = ("LBNHC", "NHD")  # of KV caches: two names of the layout of `backend.py`
# Targets whose layers have ALiBi slopes always; Falcon's config.json says whether they have.
ALIBI = ("BloomForCausalLM", "Step1ForCausalLM")
# Targets whose layers name a backend of their own: of sparse attention, or of keys and values of different sizes.
OWN_ATTENTION = (
    *("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM"),
    *("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
)


def unsupported_reasons(vllm_config: Any) -> list[str]:
    """Why our worker does not support this ``VllmConfig``; empty when it does."""
    device_type = vllm_config.device_config.device_type
    if device_type not in WORKERS:
        return [f"--device {device_type}: only CPUs and NVIDIA GPUs are served"]
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model = vllm_config.model_config
    is_narrow = max(head_dims(vllm_config)) <= MAX_HEAD_DIM
    name, transfer, flag = model.architectures[0], planned_transfer(vllm_config), connector_flag(vllm_config)
    checks: tuple[tuple[bool, str], ...] = (
        (
            parallel.worker_cls != ENGINE_WORKERS[device_type],
            f"--worker-cls {parallel.worker_cls}: it is not vLLM's own",
        ),
        *unserved_ranks(vllm_config),
        (
            speculative.rejection_sample_method not in ("standard", "synthetic", "block"),
            f"rejection_sample_method {speculative.rejection_sample_method}: it belongs to vLLM's chains",
        ),
        (speculative.use_heterogeneous_vocab, "use_heterogeneous_vocab: it belongs to vLLM's chains"),
        (
            not isinstance(vllm_config.additional_config, dict),
            f"additional_config: it is {type(vllm_config.additional_config).__name__}, only a dictionary is served",
        ),
        *_unserved_caches(vllm_config),
        *unserved_latent(vllm_config),
        (
            model.is_attention_free or (model.is_hybrid and name not in GATED_DELTA_NETS),
            f"target {name}: state-space layers are not served yet",
        ),
        (model.is_hybrid and vllm_config.cache_config.use_replayssm, "--use-replayssm: it is of vLLM's own layers"),
        (
            (model.is_hybrid or model.use_mla) and transfer is not None,
            f"{flag}: it is not served with target {name} yet",
        ),
        *_unserved_scheduler(vllm_config.scheduler_config),
        (model.is_encoder_decoder, f"target {name}: encoder-decoder models are not served"),
        (
            name in ALIBI or bool(getattr(model.hf_text_config, "alibi", False)),
            f"target {name}: attention with ALiBi is not served",
        ),
        (
            name in OWN_ATTENTION,
            f"target {name}: its layers have attention of their own (sparse, or with keys and values of different "
            "sizes), which is not served",
        ),
        (
            model.is_mm_prefix_lm,  # False where the flags allow text only
            f"target {name}: its images attend in both directions, which is not served yet"
            # On a GPU the size of heads is a reason of its own.
            + ("; with --language-model-only its texts are" * (device_type == "cpu" or is_narrow)),
        ),
        *_unserved_processors(vllm_config),
        *unserved_heads(vllm_config),
    )
    reasons = [why for found, why in checks if found] + unserved_connectors(transfer, flag)
    reasons = reasons or _needing_v2(vllm_config)  # which names some of them again
    if device_type == "cuda":
        reasons += unsupported_on_gpu(vllm_config)
    return reasons


def _unserved_processors(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """Logits processors that users bring: what they do at a node depends on them, and they know chains only.

    vLLM applies them beside speculation in its V2 model runner.
    """
    configured = [
        name if isinstance(name, str) else name.__name__ for name in vllm_config.model_config.logits_processors or ()
    ]
    installed = [point.value for point in entry_points(group=LOGITSPROCS_GROUP)]
    none = "" if vllm_config.use_v2_model_runner else ", and vLLM's V1 model runner applies none beside speculation"
    return (
        (bool(configured), f"--logits-processors {' '.join(configured)}: they are not applied along trees yet{none}"),
        (
            bool(installed),
            f"{LOGITSPROCS_GROUP} has {' '.join(installed)} installed: they are not applied along trees yet{none}",
        ),
    )


def _unserved_scheduler(scheduler_config: Any) -> tuple[tuple[bool, str], ...]:
    """A scheduler of the user's that our hooks may not see: grammars are followed along trees by the parents of their
    nodes, which come with the drafts."""
    chosen = scheduler_config.scheduler_cls
    if chosen is None:
        return ()
    from vllm.v1.core.sched.scheduler import Scheduler

    # The class is imported here, as vLLM does it in the process of the engine.
    given = scheduler_config.get_scheduler_cls()
    own = [name for name in DRAFTS_ARRIVE if getattr(given, name, None) is not getattr(Scheduler, name)]
    shown = chosen if isinstance(chosen, str) else f"{given.__module__}.{given.__qualname__}"
    return (
        (
            bool(own),
            f"--scheduler-cls {shown}: its {' and '.join(own)} is not that of vLLM's Scheduler, through which grammars "
            "are followed along trees",
        ),
    )


def _unserved_caches(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """What holds of the caches of keys and values that our attention does not read, each with its sentence."""
    from vllm import envs

    cache, model, speculative = vllm_config.cache_config, vllm_config.model_config, vllm_config.speculative_config
    named, own, draft = cache.cache_dtype, str(model.dtype).removeprefix("torch."), speculative.kv_cache_dtype
    scheme = (getattr(model.hf_config, "quantization_config", None) or {}).get("kv_cache_scheme") or {}
    layout = envs.VLLM_KV_CACHE_LAYOUT
    return (
        (
            layout not in (None, *LAYOUTS),
            f"VLLM_KV_CACHE_LAYOUT {layout}: only {' or '.join(LAYOUTS)}, which are one layout, is served",
        ),
        (
            named not in ("auto", own, *FLOAT8),
            f"--kv-cache-dtype {named}: only the model's own dtype and {', '.join(FLOAT8)} are served",
        ),
        (
            draft not in (None, named),
            f"kv_cache_dtype {draft} of the head: only that of the target, {named}, is served",
        ),
        (
            bool(cache.kv_cache_dtype_skip_layers),
            "--kv-cache-dtype-skip-layers: caches of several dtypes are not served yet",
        ),
        (
            named in FLOAT8 and scheme.get("strategy") == "attn_head",
            f"target {model.architectures[0]}: scales per head of its KV cache are not served yet, one per layer is",
        ),
        (
            named in FLOAT8 and model.is_hybrid,
            f"--kv-cache-dtype {named}: it is not served with target {model.architectures[0]} yet",
        ),
    )


def _needing_v2(vllm_config: Any) -> list[str]:
    """What vLLM has in its V2 model runner only and ours do not serve, whichever they are made of."""
    model, encoders = vllm_config.model_config, vllm_config.ec_transfer_config
    profiler, shared = vllm_config.profiler_config, "cross_encoder_cache"
    checks = (
        (vllm_config.attention_config.hisparse_config is not None, "HiSparse"),
        (vllm_config.watermark_config is not None, "watermarking"),
        (vllm_config.aux_output_config.enabled, "auxiliary outputs"),
        (model.return_sampling_mask, "--return-sampling-mask"),
        (model.enable_trace_replay, "--enable-trace-replay"),
        (
            profiler.profiler == "proton" and profiler.proton_graph_attribution,
            "proton_graph_attribution of --profiler-config",
        ),
        (encoders is not None and encoders.ec_connector == "ECCPUConnector", "--ec-transfer-config ECCPUConnector"),
        (
            encoders is not None and bool(encoders.get_from_extra_config(shared, False)),
            f"{shared} of --ec-transfer-config",
        ),
        (model.architectures[0] == "LongcatFlashNgramForCausalLM", "target LongcatFlashNgramForCausalLM"),
    )
    found = [what for holds, what in checks if holds] + unlisted_by_v1(vllm_config)
    return [f"{what}: it is not served yet, vLLM has it in its V2 model runner only" for what in found]
