"""Decides whether the plugin's worker or the engine's own serves, with the reasons.

With a target or flag that ours does not support the engine's own worker serves: the user loses speed, never the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from eagle_plugin.heads.block_config import ARCHITECTURES
from eagle_plugin.heads.files import HeadError
from eagle_plugin.kernels import loader
from eagle_plugin.runtime.collect_start import check_collecting
from eagle_plugin.runtime.gpu import Gpu, unsupported_gpu
from eagle_plugin.runtime.round_metrics import RejectionWatch
from eagle_plugin.runtime.startup import LEFT, StartRefused, engine_serves, plugin_serves
from eagle_plugin.runtime.synthetic import WARNING, source_of
from eagle_plugin.sglang.adapters import unsupported_adapters
from eagle_plugin.sglang.block_flags import asked_algorithm
from eagle_plugin.sglang.block_support import refuse_on_a_cpu, unsupported_block_drafters, worker_class
from eagle_plugin.sglang.caches import cache_dtypes, unsupported_cache
from eagle_plugin.sglang.draft_classes import unsupported_draft_class, unsupported_mtp_layers
from eagle_plugin.sglang.flag_support import unsupported_flags
from eagle_plugin.sglang.parallel_support import unsupported_models_beside
from eagle_plugin.sglang.ranks import rank_logger
from eagle_plugin.sglang.synthetic import SETTING
from eagle_plugin.sglang.target_configs import GATED_DELTA_NETS, unsupported_config

logger = logging.getLogger("eagle_plugin")


def unsupported_models(target_runner: Any, draft_architecture: str) -> list[str]:
    """Why our worker does not support this loaded target (an SGLang ``ModelRunner``) or head; empty when it does."""
    name = target_runner.model_config.hf_config.architectures[0]
    reasons = unsupported_config(target_runner.model_config)
    is_block = draft_architecture in ARCHITECTURES.values() and target_runner.spec_algorithm.is_dflash()
    if not is_block:
        reasons += unsupported_draft_class(draft_architecture)
    if type(target_runner.sampler).__name__ != "Sampler":
        reasons.append(f"sampler {type(target_runner.sampler).__name__}: only SGLang's own sampler is served")
    reasons += _unsupported_attention(target_runner.model, name)
    return reasons


def unsupported_chunks(target_runner: Any) -> list[str]:
    """Why trees are not served with this target's attention chunks; empty where they are, or has none."""
    from eagle_plugin.sglang.pools import chunk_of

    config, chunk = target_runner.model_config, chunk_of(target_runner)
    if target_runner.device == "cpu" and 0 < chunk < config.context_len and not _knows_chunks(target_runner.model):
        return [
            f"target {config.hf_config.architectures[0]}: SGLang's attention on this CPU does not know its chunks of "
            f"{chunk} tokens; it is served up to --context-length {chunk}"
        ]
    return []


def _knows_chunks(model: Any) -> bool:
    """Whether the engine's own attention on a CPU gets the chunks, in place of windows (eagle-plugin-sglang-cpu)."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [layer for layer in model.modules() if isinstance(layer, RadixAttention)]
    return all(layer.sliding_window_size < -1 for layer in layers if layer.use_irope)


def unsupported_states(target_runner: Any, arguments: Any) -> list[str]:
    """Why trees are not served with the states of this target's linear layers; empty where they are, or has none."""
    if target_runner.model_config.hf_config.architectures[0] not in GATED_DELTA_NETS:
        return []
    if target_runner.device != "cpu":
        return [f"--device {target_runner.device}: gated delta nets are served on CPUs only"]
    from sglang.srt.utils.common import cpu_has_amx_support

    if cpu_has_amx_support():
        return ["SGLang's kernels for AMX: they keep the weights of gated delta nets in an order of their own"]
    if not arguments.disable_radix_cache and arguments.mamba_radix_cache_strategy != "no_buffer":
        return [
            f"--mamba-radix-cache-strategy {arguments.mamba_radix_cache_strategy}: states are served with no_buffer, "
            "or with --disable-radix-cache"
        ]
    if arguments.enable_linear_replayssm or arguments.enable_linear_replayssm_spec:
        return ["--enable-linear-replayssm: states are served as the engine keeps them without it"]
    return []


def _unsupported_attention(model: Any, name: str) -> list[str]:
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
            return [f"target {name}: only causal self-attention is served"]
        if layer.xai_temperature_len > 0 or layer.logit_capping_method != "tanh":
            return [f"target {name}: attention temperature or a capping other than tanh is not served yet"]
        if layer.qk_head_dim != layer.v_head_dim:
            return [f"target {name}: key and value heads of different sizes are not served yet"]
    return []


def worker_factory(algorithm: str, engine_worker: type) -> Callable[..., Any]:
    """What the scheduler instantiates instead of the engine's class: it sees the loaded target before it chooses."""

    def create(server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> Any:
        arguments = {
            "server_args": server_args,
            "gpu_id": gpu_id,
            "nccl_port": nccl_port,
            "target_worker": target_worker,
        }
        from eagle_plugin.sglang import selftest

        runner, log = target_worker.model_runner, rank_logger(logger)
        reasons = unsupported_reasons(server_args, runner) or selftest.failed_kernels(runner)
        if reasons:
            refuse_on_a_cpu(algorithm, runner.device, reasons)
            check_collecting(reasons)
            log.warning(engine_serves(algorithm, "SGLang", reasons))
            return engine_worker(**arguments)
        check_collecting(["it has a block drafter"] if algorithm == "DFLASH" else [])
        from eagle_plugin.sglang import eagle3_model, finish, metrics, refused_requests
        from eagle_plugin.sglang.chain_advice import change_for_trees

        eagle3_model.register()
        try:
            worker = worker_class(algorithm)(**arguments)
        except HeadError as error:  # of a head on a model hub: those in folders were checked by the launcher
            raise StartRefused(error) from None

        def announce(reasons: list[str]) -> None:
            """Say who serves, once that is decided: after the last part of the self-test."""
            if reasons:
                log.warning(engine_serves(algorithm, "SGLang", reasons))
                return
            head = None if worker.draft_worker.is_own_layer else server_args.speculative_draft_model_path
            watch = RejectionWatch(server_args.model_path, head, log)
            # By name: the worker gets its policy later.
            metrics.count_rounds(worker.shape, watch, lambda: worker.shapes, log)
            finish.finish_in_order()
            refused_requests.refuse_requests()
            asked = asked_algorithm(server_args, algorithm)
            log.info(plugin_serves(asked, worker.shape, loader.backend(worker.device)))
            if change := change_for_trees(server_args, worker.shape):
                log.info("eagle-plugin: %s", change)
            if worker.synthetic is not None:
                log.warning(WARNING, source_of(worker.synthetic, SETTING))

        worker.announce = announce
        return worker

    return create


def unsupported_reasons(server_args: Any, target_runner: Any) -> list[str]:
    """Why our worker does not support this server; empty when it does."""
    reasons = unsupported_settings(server_args, target_runner)
    if not reasons and target_runner.device == "cuda":
        from sglang.srt.arg_groups.model_override_base import resolved_view

        from eagle_plugin.sglang.selftest import agree

        reasons += agree(unsupported_devices(target_runner, resolved_view(server_args)))  # of all ranks
    return reasons


def unsupported_settings(server_args: Any, target_runner: Any) -> list[str]:
    """The same of flags, both models and their caches; no device is asked."""
    from sglang.srt.arg_groups.model_override_base import resolved_view

    arguments = resolved_view(server_args)
    reasons = unsupported_flags(arguments)
    if left := os.environ.get(LEFT):  # of the launcher's check
        reasons.append(left)
    draft_config = target_runner.spec_aux_config.draft_model_config
    if draft_config is None:
        return [*reasons, "--speculative-draft-model-path is not given, and SGLang finds no draft layers in the target"]
    reasons += unsupported_cache(target_runner, arguments.speculative_draft_kv_cache_dtype)
    reasons += unsupported_models(target_runner, draft_config.hf_config.architectures[0])
    reasons += unsupported_chunks(target_runner)
    reasons += unsupported_states(target_runner, arguments)
    reasons += unsupported_adapters(target_runner)
    reasons += unsupported_mtp_layers(arguments, draft_config)
    reasons += unsupported_models_beside(arguments, target_runner, draft_config)
    reasons += unsupported_block_drafters(arguments, server_args, target_runner)
    return reasons


def unsupported_devices(target_runner: Any, arguments: Any) -> list[str]:
    """Why our worker does not serve on the current CUDA device; arguments: of the server, resolved."""
    configs = target_runner.model_config, target_runner.spec_aux_config.draft_model_config
    caches = cache_dtypes(target_runner, arguments)
    return unsupported_gpu(Gpu.current(), [config.head_dim for config in configs], caches)
