"""Decides whether our worker or vLLM's own serves a configuration, and says so in one log line.

A flag that ours cannot serve is left to the engine's own drafter: the user loses speed, never the server.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import eagle_plugin
from eagle_plugin.core.shape import Shape
from eagle_plugin.engines.vllm.options import Options
from eagle_plugin.heads.checkpoint import check_head, read_config

logger = logging.getLogger("vllm.eagle_plugin")

METHODS = ("eagle", "eagle3")
ENGINE_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKER = "eagle_plugin.engines.vllm.worker.TreeCPUWorker"
HEAD_ARCHITECTURES = ("EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
CHECKED_ARCHITECTURES = ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3")  # as they stand in config.json
_SERVED = "_eagle_plugin_serves"
_said: set[str] = set()


def take_over(vllm_config: Any) -> None:
    """Give a vLLM ``VllmConfig`` our worker class where it serves. Raises OptionError and HeadError."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None or speculative.method not in METHODS:
        return
    options = Options.read(vllm_config.additional_config)
    if parallel.worker_cls == WORKER:  # a configuration that is completed again: the platform's word was the last
        vllm_config.scheduler_config.async_scheduling = options.async_scheduling
        return
    if reasons := left_alone(vllm_config):
        _say(
            logging.WARNING,
            f"eagle-plugin {eagle_plugin.__version__}: {speculative.method} is served by vLLM's own drafter: "
            + "; ".join(reasons),
        )
        return
    shape = options.shape(speculative.num_speculative_tokens)
    _check_folders(vllm_config)
    parallel.worker_cls = WORKER
    vllm_config.scheduler_config.async_scheduling = options.async_scheduling
    setattr(speculative, _SERVED, shape)
    from eagle_plugin.engines.vllm.metrics import export

    export()


def served_shape(speculative_config: Any) -> Shape | None:
    """The caps of our worker's trees under this vLLM ``SpeculativeConfig``; None where it does not serve."""
    return getattr(speculative_config, _SERVED, None)


def is_served(speculative_config: Any) -> bool:
    """Whether our worker serves the configuration that this ``SpeculativeConfig`` is part of."""
    return served_shape(speculative_config) is not None


def left_alone(vllm_config: Any) -> list[str]:
    """Why this ``VllmConfig`` is left to the engine's own drafter; empty when ours serves it."""
    if vllm_config.device_config.device_type != "cpu":
        return ["this version serves vLLM on CPUs only"]
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model, draft = vllm_config.model_config, speculative.draft_model_config
    name = model.architectures[0]
    checks: tuple[tuple[bool, str], ...] = (
        (parallel.worker_cls != ENGINE_WORKER, f"--worker-cls {parallel.worker_cls}: it is not vLLM's own"),
        (vllm_config.use_v2_model_runner, "VLLM_USE_V2_MODEL_RUNNER: the V2 model runner is not served yet"),
        (parallel.tensor_parallel_size > 1, "--tensor-parallel-size: tensor parallelism is not served yet"),
        (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size: pipeline parallelism is not served yet"),
        (parallel.data_parallel_size > 1, "--data-parallel-size: data parallelism inside one engine is not served yet"),
        (parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size: it is not served yet"),
        (speculative.parallel_drafting, "parallel_drafting: P-EAGLE heads are not served yet"),
        (speculative.disable_padded_drafter_batch, "disable_padded_drafter_batch: trees are drafted in padded batches"),
        (
            bool(speculative.num_speculative_tokens_per_batch_size),
            "num_speculative_tokens_per_batch_size: it belongs to vLLM's chains",
        ),
        (speculative.rejection_sample_method != "standard", "rejection_sample_method: it belongs to vLLM's chains"),
        (speculative.use_heterogeneous_vocab, "use_heterogeneous_vocab: it belongs to vLLM's chains"),
        (speculative.use_local_argmax_reduction, "use_local_argmax_reduction: it belongs to vLLM's chains"),
        (vllm_config.kv_transfer_config is not None, "--kv-transfer-config: it is not served yet"),
        (vllm_config.cache_config.cache_dtype != "auto", "--kv-cache-dtype: only the model's own dtype is served"),
        (model.use_mla, f"target {name}: latent (MLA) attention is not served yet"),
        (model.is_hybrid or model.is_attention_free, f"target {name}: state-space layers are not served yet"),
        (model.is_encoder_decoder, f"target {name}: encoder-decoder models are not served"),
        (model.uses_mrope or model.is_multimodal_model, f"target {name}: multimodal targets are not served yet"),
        (
            draft.architecture not in HEAD_ARCHITECTURES,
            f"draft head {draft.architecture}: not one of {', '.join(HEAD_ARCHITECTURES)}",
        ),
    )
    return [why for found, why in checks if found]


def _check_folders(vllm_config: Any) -> None:
    """Refuse a head that does not fit its target before weights are loaded.

    Names on a model hub, and formats that only vLLM reads, are vLLM's to check.
    """
    speculative = vllm_config.speculative_config
    target, head = vllm_config.model_config.model, speculative.model
    if not (Path(target).is_dir() and Path(head).is_dir()):
        return
    if (read_config(head).get("architectures") or ["?"])[0] not in CHECKED_ARCHITECTURES:
        return
    for warning in check_head(target, head, algorithm=speculative.method.upper()).warnings:
        _say(logging.WARNING, f"eagle-plugin: {warning}")


def _say(level: int, line: str) -> None:
    """Log a line once a process: vLLM completes some configurations several times."""
    if line not in _said:
        _said.add(line)
        logger.log(level, line)
