"""Decides whether the plugin's worker or vLLM's own serves a configuration (`unsupported.py` has the reasons).

With a flag that ours does not support vLLM's own worker serves: the user loses speed, never the server.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.heads import block_config
from eagle_plugin.heads.block_drafter import block_warnings, describe_block
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError, LeftToEngine
from eagle_plugin.heads.manifest import trained_depths
from eagle_plugin.heads.pickles import pickles_of, unchecked
from eagle_plugin.heads.vllm_classes import METHODS, MISTRAL
from eagle_plugin.heads.vllm_rules import check_head, count_aux
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.policy.log import log_seconds
from eagle_plugin.policy.shapes import PARALLEL_LEVELS
from eagle_plugin.runtime.collect_start import NO_HEAD, check_collecting
from eagle_plugin.runtime.head_mailbox import check_folder
from eagle_plugin.runtime.preflight import can_check, refuse_targets_config
from eagle_plugin.runtime.startup import engine_serves
from eagle_plugin.runtime.synthetic import WARNING, source_of
from eagle_plugin.selftest.subject import Subject
from eagle_plugin.vllm import mtp_support
from eagle_plugin.vllm.block_support import levels_of_drafter, plan_as_dflash
from eagle_plugin.vllm.chain_options import drop_chain_options
from eagle_plugin.vllm.compile_cache import set_compile_key
from eagle_plugin.vllm.draft_limits import draft_limits, limits_above
from eagle_plugin.vllm.graph_modes import keep_attention_out
from eagle_plugin.vllm.latent_limits import schedule_whole_prompts
from eagle_plugin.vllm.masked_rows import configured_levels
from eagle_plugin.vllm.options import Options
from eagle_plugin.vllm.plugin_config import PluginConfig, set_plugin_config
from eagle_plugin.vllm.policy_reports import make_report_folder
from eagle_plugin.vllm.releases import keep_hits_long
from eagle_plugin.vllm.runner_choice import choose_runner
from eagle_plugin.vllm.selftest import failed_kernels, subject_of
from eagle_plugin.vllm.synthetic import SETTING, synthetic_rates
from eagle_plugin.vllm.unsupported import WORKERS, unsupported_reasons

logger = logging.getLogger("vllm.eagle_plugin")

LINEAR_OPERATOR = "eagle_plugin::gated_delta_trees"  # of `linear_attention.py`
# Of --load-format: what reads the safetensors of a model's folder. "dummy" and others need none there.
READ_FOLDERS = (
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral", "npcache",
)  # fmt: skip
_logged: set[str] = set()


class Drafting(NamedTuple):
    """What the head of a configuration drafts."""

    levels: Levels  # how it lists the levels of a tree
    shape: Shape  # the caps of the trees
    is_block: bool


def choose_worker(vllm_config: Any) -> None:
    """Put our worker class into a vLLM ``VllmConfig`` that it supports; else the log says why vLLM's own serves.

    Raises OptionError, PolicyModeError and HeadError.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None or speculative.method not in mtp_support.METHODS:
        if vllm_config.model_config is not None:
            check_collecting([NO_HEAD])
        return
    scheduler = vllm_config.scheduler_config
    options = Options.read(vllm_config.additional_config).beside(scheduler.async_scheduling)
    if parallel.worker_cls in WORKERS.values():  # vLLM completes it again; on a CPU it has just reset the flag
        scheduler.async_scheduling = options.async_scheduling
        return
    target, head = vllm_config.model_config.model, speculative.model
    has_folder = speculative.method != mtp_support.METHOD
    if has_folder and can_check(target, head):
        refuse_targets_config(target, head)  # vLLM's own drafter cannot serve it either
    if reasons := unsupported_reasons(vllm_config):
        _leave_to_engine(speculative.method, reasons)
        return
    check_collecting(["it has a block drafter"] if speculative.method in block_config.METHODS else [])
    policy_mode()
    check_folder()
    synthetic = synthetic_rates(speculative)
    draft_limits(vllm_config)
    try:
        drafting = _read_head(vllm_config, options)
    except LeftToEngine as reason:
        _leave_to_engine(speculative.method, [str(reason)])
        return
    v2, runner = choose_runner(vllm_config)
    subject = subject_of(vllm_config, drafting.shape, drafting.levels, v2)
    if reasons := failed_kernels(subject, _log_once):
        _leave_to_engine(speculative.method, reasons)
        return
    if runner:
        _log_once(logging.INFO, f"eagle-plugin: {runner}")
    if synthetic is not None:
        _log_once(logging.WARNING, WARNING % source_of(synthetic, SETTING))
    scheduler.async_scheduling = options.async_scheduling
    _serve(vllm_config, drafting, subject, v2)


def _leave_to_engine(method: str, reasons: list[str]) -> None:
    """Log that vLLM's own worker serves. Raises UserError where that ends what the user asked for."""
    check_collecting(reasons)
    _log_once(logging.WARNING, engine_serves(method, "vLLM", reasons))


def _read_head(vllm_config: Any, options: Options) -> Drafting:
    """Check the head, and correct what vLLM has read of it.

    Raises OptionError, HeadError, and `LeftToEngine` where vLLM's own worker may serve it.
    """
    speculative = vllm_config.speculative_config
    target, head, nodes = vllm_config.model_config.model, speculative.model, speculative.num_speculative_tokens
    is_block = speculative.method in block_config.METHODS
    levels = Levels.PARALLEL if is_block else configured_levels(speculative)
    trained = levels_of_drafter(speculative) if is_block else trained_depths(head) if levels.depth_is_free else None
    on_gpu = vllm_config.device_config.device_type != "cpu"
    shape = options.shape(nodes, trained or PARALLEL_LEVELS if levels.depth_is_free else None, on_gpu)
    warnings: list[str] = []
    load_format = (speculative.draft_load_config or vllm_config.load_config).load_format
    has_folder = speculative.method != mtp_support.METHOD
    is_checked = has_folder and speculative.draft_model_config.architecture not in MISTRAL
    if has_folder and not is_block and load_format in READ_FOLDERS and (pickles := pickles_of(head)):
        warnings = [unchecked(head, pickles)]
    elif is_checked and _can_read(target, head, load_format):
        warnings = _check_head(target, head, speculative.method, shape.steps)
        if is_block:
            warnings += block_warnings(head, nodes)
        elif count := count_aux(target, head):
            speculative.draft_model_config.hf_config.num_aux_hidden_states = count  # vLLM's class takes 3 for it
        if read_head(head).leftover_quantisation:
            speculative.draft_model_config.quantization = None  # its layers read the weights as they are stored
    for warning in [*warnings, *filter(None, [limits_above(vllm_config)])]:
        _log_once(logging.WARNING, f"eagle-plugin: {warning}")
    return Drafting(levels, shape.within_steps(trained), is_block)


def _serve(vllm_config: Any, drafting: Drafting, subject: Subject | None, v2: bool) -> None:
    """Put our worker, and what it needs, into the configuration; subject: of its self-test."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    keep_hits_long(speculative)
    if drafting.is_block:
        plan_as_dflash(speculative)
    else:
        speculative.parallel_drafting = False  # it is how vLLM drafts; our worker knows the head by its mask token
    if dropped := drop_chain_options(speculative):
        _log_once(
            logging.INFO,
            f"eagle-plugin: {', '.join(dropped)}: dropped, because it belongs to vLLM's chains and changes no text",
        )
    schedule_whole_prompts(vllm_config)
    if vllm_config.device_config.device_type != "cpu" and (taken := keep_attention_out(vllm_config)):
        _log_once(
            logging.INFO,
            f"eagle-plugin: --compilation-config {', '.join(taken)}: taken back, because attention over trees stays "
            "outside of vLLM's CUDA graphs and compiled code",
        )
    if vllm_config.model_config.is_hybrid:
        _keep_one_state(vllm_config)
        _split_at_our_operator(vllm_config.compilation_config)
    parallel.worker_cls = WORKERS[vllm_config.device_config.device_type]
    set_compile_key(vllm_config, drafting.shape)
    # These import vLLM's server side: only where we serve.
    from eagle_plugin.vllm.executor import TreeExecutor
    from eagle_plugin.vllm.metrics import export

    # A connector of encoder caches counts its reports by the name of the executor.
    if parallel.distributed_executor_backend == "mp" and vllm_config.ec_transfer_config is None:
        parallel.distributed_executor_backend = TreeExecutor

    log_seconds()
    engines = parallel.data_parallel_size
    slots = drafting.levels.draft_slots(drafting.shape)
    ours = PluginConfig(drafting.shape, make_report_folder(), subject, v2, engines, draft_slots=slots)
    set_plugin_config(speculative, ours)
    export()


def _keep_one_state(vllm_config: Any) -> None:
    """Switch prefix caching off on a CPU: it is vLLM's default, and needs the states of linear layers at every block.

    On GPUs it is left to users whether they want it, or our worker (`gpu.unsupported_on_gpu`).
    """
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


def _can_read(target: str, head: str, load_format: Any) -> bool:
    """Whether a head's files can be checked: not where it is not in a folder, or its folder has no weights and needs
    none by the format that it is loaded by."""
    has_weights = load_format in READ_FOLDERS or any(Path(head).glob("*.safetensors"))
    return has_weights and can_check(target, head)


def _check_head(target: str, head: str, method: str, steps: int | None = None) -> list[str]:
    """Warnings about a head in a folder that our worker will serve.

    steps: the levels of its trees. Raises HeadError, and `LeftToEngine` where vLLM's own worker may serve it.
    """
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
    if method not in METHODS or not isinstance(head, str):
        return None
    own = given.get("draft_load_config") or {"load_format": arguments.load_format}
    load_format = own.get("load_format", "auto") if isinstance(own, dict) else own.load_format
    if not _can_read(target, head, load_format):
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


def _log_once(level: int, line: str) -> None:
    """Log a line once per process: vLLM completes some configurations several times."""
    if line not in _logged:
        _logged.add(line)
        logger.log(level, line)
