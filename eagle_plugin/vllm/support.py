"""Decides whether the plugin's worker or vLLM's own serves a configuration, with the reasons.

With a flag that ours does not support vLLM's own worker serves: the user loses speed, never the server.
"""

from __future__ import annotations

import logging
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Levels
from eagle_plugin.heads import block_config
from eagle_plugin.heads.block_drafter import block_warnings, describe_block
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError, LeftToEngine
from eagle_plugin.heads.manifest import trained_depths
from eagle_plugin.heads.vllm_rules import check_head, count_aux
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.policy.log import log_seconds
from eagle_plugin.policy.shapes import PARALLEL_LEVELS
from eagle_plugin.runtime.collect_start import NO_HEAD, check_collecting
from eagle_plugin.runtime.head_mailbox import check_folder
from eagle_plugin.runtime.preflight import can_check, refuse_targets_config
from eagle_plugin.runtime.startup import engine_serves
from eagle_plugin.runtime.synthetic import WARNING, source_of
from eagle_plugin.vllm.block_support import levels_of_drafter, plan_as_dflash, unlisted_by_v1, unserved_heads
from eagle_plugin.vllm.cache_dtypes import FLOAT8
from eagle_plugin.vllm.compile_cache import set_compile_key
from eagle_plugin.vllm.draft_limits import draft_limits, limits_above
from eagle_plugin.vllm.gpu import unsupported_on_gpu
from eagle_plugin.vllm.kv_connectors import unserved_connectors
from eagle_plugin.vllm.latent_limits import schedule_whole_prompts, unserved_latent
from eagle_plugin.vllm.masked_rows import configured_levels
from eagle_plugin.vllm.options import Options
from eagle_plugin.vllm.parallel_support import unserved_ranks
from eagle_plugin.vllm.plugin_config import PluginConfig, set_plugin_config
from eagle_plugin.vllm.policy_reports import make_report_folder
from eagle_plugin.vllm.releases import keep_hits_long
from eagle_plugin.vllm.runner_choice import choose_runner
from eagle_plugin.vllm.selftest import failed_kernels, subject_of
from eagle_plugin.vllm.synthetic import SETTING, synthetic_rates

logger = logging.getLogger("vllm.eagle_plugin")

METHODS = ("eagle", "eagle3", *block_config.METHODS)
# By the kind of device: vLLM's own worker, and ours.
ENGINE_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
WORKERS = {
    "cpu": "eagle_plugin.vllm.cpu_worker.TreeCPUWorker",
    "cuda": "eagle_plugin.vllm.worker.TreeWorker",
}
# Targets with linear layers that our worker computes.
GATED_DELTA_NETS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
LINEAR_OPERATOR = "eagle_plugin::gated_delta_trees"  # of `linear_attention.py`
_logged: set[str] = set()


def choose_worker(vllm_config: Any) -> None:
    """Put our worker class into a vLLM ``VllmConfig`` that it supports.

    Raises OptionError, PolicyModeError and HeadError.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None or speculative.method not in METHODS:
        if vllm_config.model_config is not None:
            check_collecting([NO_HEAD])
        return
    scheduler = vllm_config.scheduler_config
    options = Options.read(vllm_config.additional_config).beside(scheduler.async_scheduling)
    if parallel.worker_cls in WORKERS.values():  # vLLM completes it again; on a CPU it has just reset the flag
        scheduler.async_scheduling = options.async_scheduling
        return
    target, head = vllm_config.model_config.model, speculative.model
    if can_check(target, head):
        refuse_targets_config(target, head)  # vLLM's own drafter cannot serve it either
    if reasons := unsupported_reasons(vllm_config):
        check_collecting(reasons)
        _log_once(logging.WARNING, engine_serves(speculative.method, "vLLM", reasons))
        return
    is_block = speculative.method in block_config.METHODS
    check_collecting(["it has a block drafter"] if is_block else [])
    policy_mode()
    check_folder()
    synthetic = synthetic_rates(speculative)
    draft_limits(vllm_config)
    levels = Levels.PARALLEL if is_block else configured_levels(speculative)
    trained = levels_of_drafter(speculative) if is_block else trained_depths(head) if levels.depth_is_free else None
    depth = trained or PARALLEL_LEVELS if levels.depth_is_free else None
    shape = options.shape(speculative.num_speculative_tokens, depth)
    try:
        warnings = _check_head(target, head, speculative.method, shape.steps)
        if is_block and can_check(target, head):
            warnings += block_warnings(head, speculative.num_speculative_tokens)
    except LeftToEngine as reason:
        check_collecting([str(reason)])
        _log_once(logging.WARNING, engine_serves(speculative.method, "vLLM", [str(reason)]))
        return
    for warning in [*warnings, *filter(None, [limits_above(vllm_config)])]:
        _log_once(logging.WARNING, f"eagle-plugin: {warning}")
    if can_check(target, head) and read_head(head).leftover_quantisation:
        speculative.draft_model_config.quantization = None  # its layers read the weights as they are stored
    if can_check(target, head) and not is_block and (count := count_aux(target, head)):
        speculative.draft_model_config.hf_config.num_aux_hidden_states = count  # vLLM's class takes 3 for it
    shape = shape.within_steps(trained)
    v2, runner = choose_runner(vllm_config)
    subject = subject_of(vllm_config, shape, levels, v2)
    if reasons := failed_kernels(subject, _log_once):
        check_collecting(reasons)
        _log_once(logging.WARNING, engine_serves(speculative.method, "vLLM", reasons))
        return
    if runner:
        _log_once(logging.INFO, f"eagle-plugin: {runner}")
    if synthetic is not None:
        _log_once(logging.WARNING, WARNING % source_of(synthetic, SETTING))
    keep_hits_long(speculative)
    if is_block:
        plan_as_dflash(speculative)
    else:
        speculative.parallel_drafting = False  # it is how vLLM drafts; our worker knows the head by its mask token
    schedule_whole_prompts(vllm_config)
    if vllm_config.model_config.is_hybrid:
        _keep_one_state(vllm_config)
        _split_at_our_operator(vllm_config.compilation_config)
    parallel.worker_cls = WORKERS[vllm_config.device_config.device_type]
    scheduler.async_scheduling = options.async_scheduling
    set_compile_key(vllm_config, shape)
    # These import vLLM's server side: only where we serve.
    from eagle_plugin.vllm.executor import TreeExecutor
    from eagle_plugin.vllm.metrics import export

    if parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = TreeExecutor

    log_seconds()
    engines = parallel.data_parallel_size
    set_plugin_config(speculative, PluginConfig(shape, make_report_folder(), subject, v2, engines))
    export()


def _keep_one_state(vllm_config: Any) -> None:
    """Switch prefix caching off, which is vLLM's default and needs the states of linear layers at every block."""
    cache = vllm_config.cache_config
    if cache.enable_prefix_caching:
        _log_once(
            logging.WARNING,
            "eagle-plugin: prefix caching is off, because the plugin keeps one state of a linear layer per request; "
            "with prefix caching vLLM's own speculation does not run with these layers on a CPU either",
        )
        cache.enable_prefix_caching, cache.mamba_cache_mode = False, "none"
        cache.mamba_block_size = vllm_config.model_config.max_model_len


def _split_at_our_operator(compilation: Any) -> None:
    """Let vLLM's own graphs end before our operator of linear layers, as they do before the one of its own.

    What it computes depends on the metadata of one forward. vLLM lists the operators after the plugin was asked.
    """
    compilation._attention_ops = [*compilation._attention_ops, LINEAR_OPERATOR]
    if compilation.splitting_ops:
        compilation.splitting_ops = [*compilation.splitting_ops, LINEAR_OPERATOR]


def _check_head(target: str, head: str, method: str, steps: int | None = None) -> list[str]:
    """Warnings about a head that our worker will serve; empty where it is not in a folder.

    steps: the levels of its trees. Raises HeadError, and `LeftToEngine` where vLLM's own worker may serve it.
    """
    if not can_check(target, head):
        return []
    if method in block_config.METHODS:
        describe_block(target, head, asked=method)
        return []
    return check_head(target, head, method, steps)


def explain_refusal(arguments: Any) -> UserError | None:
    """What is wrong with the head of vLLM's ``EngineArgs`` whose speculative configuration vLLM has refused.

    None where the flags name no head that we would serve, or its files are not the reason.
    """
    given = arguments.speculative_config or {}
    target, head, method = arguments.model, given.get("model"), given.get("method")
    if method not in METHODS or not isinstance(head, str) or not can_check(target, head):
        return None
    try:
        refuse_targets_config(target, head)
        _check_head(target, head, method)
        if read_head(head).leftover_quantisation:
            return HeadError(
                f"{head} has a quantization_config in config.json, but its weights are plain, and vLLM does not take "
                "the method here; remove the key from the head's config.json"
            )
    except LeftToEngine:
        return None  # vLLM says itself what it does not take
    except UserError as error:
        return error
    return None


def unsupported_reasons(vllm_config: Any) -> list[str]:
    """Why our worker does not support this ``VllmConfig``; empty when it does."""
    device_type = vllm_config.device_config.device_type
    if device_type not in WORKERS:
        return [f"--device {device_type}: only CPUs and NVIDIA GPUs are served"]
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model = vllm_config.model_config
    name = model.architectures[0]
    checks: tuple[tuple[bool, str], ...] = (
        (
            parallel.worker_cls != ENGINE_WORKERS[device_type],
            f"--worker-cls {parallel.worker_cls}: it is not vLLM's own",
        ),
        *unserved_ranks(vllm_config),
        (speculative.disable_padded_drafter_batch, "disable_padded_drafter_batch: trees are drafted in padded batches"),
        (
            speculative.rejection_sample_method not in ("standard", "synthetic"),
            f"rejection_sample_method {speculative.rejection_sample_method}: it belongs to vLLM's chains",
        ),
        (speculative.use_heterogeneous_vocab, "use_heterogeneous_vocab: it belongs to vLLM's chains"),
        (speculative.use_local_argmax_reduction, "use_local_argmax_reduction: it belongs to vLLM's chains"),
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
            (model.is_hybrid or model.use_mla) and vllm_config.kv_transfer_config is not None,
            f"--kv-transfer-config: it is not served with target {name} yet",
        ),
        (model.is_encoder_decoder, f"target {name}: encoder-decoder models are not served"),
        (
            model.is_mm_prefix_lm,  # False where the flags allow text only
            f"target {name}: its images attend in both directions, which is not served yet; with "
            "--language-model-only its texts are",
        ),
        *unserved_heads(vllm_config),
    )
    reasons = [why for found, why in checks if found] + unserved_connectors(vllm_config.kv_transfer_config)
    reasons = reasons or _needing_v2(vllm_config)  # which names some of them again
    if device_type == "cuda":
        reasons += unsupported_on_gpu(vllm_config)
    return reasons


def _unserved_caches(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    """What holds of the caches of keys and values that our attention does not read, each with its sentence."""
    cache, model, speculative = vllm_config.cache_config, vllm_config.model_config, vllm_config.speculative_config
    named, own, draft = cache.cache_dtype, str(model.dtype).removeprefix("torch."), speculative.kv_cache_dtype
    scheme = (getattr(model.hf_config, "quantization_config", None) or {}).get("kv_cache_scheme") or {}
    return (
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
    model = vllm_config.model_config
    checks = (
        (vllm_config.attention_config.hisparse_config is not None, "HiSparse"),
        (vllm_config.watermark_config is not None, "watermarking"),
        (vllm_config.aux_output_config.enabled, "auxiliary outputs"),
        (model.return_sampling_mask, "--return-sampling-mask"),
        (model.enable_trace_replay, "--enable-trace-replay"),
    )
    found = [what for holds, what in checks if holds] + unlisted_by_v1(vllm_config)
    return [f"{what}: it is not served yet, vLLM has it in its V2 model runner only" for what in found]


def _log_once(level: int, line: str) -> None:
    """Log a line once per process: vLLM completes some configurations several times."""
    if line not in _logged:
        _logged.add(line)
        logger.log(level, line)
