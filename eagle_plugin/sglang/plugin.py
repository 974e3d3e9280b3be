"""Entry point ``sglang.srt.plugins``: our worker serves the built-in algorithms EAGLE, EAGLE3 and DFLASH, and on a CPU
DSPARK.

SGLang calls :func:`register` in every process that it starts (launcher, scheduler, detokenizer). It swallows whatever
a plugin raises, so a failure half way must not leave some hooks registered: nothing before the registrations may fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.collect.settings import STORE
from eagle_plugin.runtime.startup import engine_serves, may_serve
from eagle_plugin.sglang import version
from eagle_plugin.traffic.settings import FOLDER

logger = logging.getLogger("eagle_plugin")

ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH")
ENGINE_WORKERS = ("EAGLEWorkerV2", "DFlashWorkerV2")

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
RESOLVE_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
RESOLVE_BLOCK_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_dflash"
RESOLVE_MARKOV_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_dspark"
AUTO_PARAMETERS = "sglang.srt.arg_groups.speculative_hook._auto_choose_speculative_params"
PREPARE_ARGUMENTS = "sglang.srt.server_args.prepare_server_args"
DECODE_ROOM = "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode"
ROW_ROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
WEIGHT_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHTS_FROM = tuple(f"update_weights_from_{source}" for source in ("disk", "ipc", "tensor", "distributed"))
CHECK_REQUEST = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
OVERLAP_ON_CPU = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"


def register() -> None:
    """Register the hooks, unless ``EAGLE_PLUGIN=0`` or the SGLang version is not a tested one."""
    if not may_serve("SGLang", version.installed(), version.TESTED, logger, _differences):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CREATE_WORKER, _create_worker, HookType.AROUND)
    HookRegistry.register(RESOLVE_ARGUMENTS, _check_arguments, HookType.AFTER)
    for name in (RESOLVE_BLOCK_ARGUMENTS, RESOLVE_MARKOV_ARGUMENTS):
        HookRegistry.register(name, _resolve_block_arguments, HookType.AROUND)
    HookRegistry.register(AUTO_PARAMETERS, _auto_parameters, HookType.AROUND)
    HookRegistry.register(ROW_ROOM, _room_for_rounds, HookType.AROUND)
    HookRegistry.register(DECODE_ROOM, _slots_of_round, HookType.AROUND)
    for name in (*WEIGHTS_FROM, "begin_weight_update", "end_weight_update"):
        HookRegistry.register(f"{WEIGHT_UPDATES}.{name}", _update_weights, HookType.AROUND)
    HookRegistry.register(CHECK_REQUEST, _check_request, HookType.AFTER)
    HookRegistry.register(PREPARE_ARGUMENTS, _add_middleware, HookType.AFTER)
    if os.environ.get("EAGLE_OVERLAP") == "1":
        HookRegistry.register(OVERLAP_ON_CPU, _keep_overlap, HookType.AROUND)
    if os.environ.get("EAGLE_GRAPHS") == "emulate":
        from eagle_plugin.runtime import graph_emulator

        graph_emulator.install()


def _differences() -> Sequence[object]:
    """What the installed SGLang has otherwise than the adapter wants it; nothing of it is imported."""
    from eagle_plugin.runtime.engine_contract import installed_differences
    from eagle_plugin.sglang.engine_contract import CONTRACT

    return installed_differences("sglang", Path(__file__).parent, CONTRACT)


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """AROUND ``SpeculativeAlgorithm.create_worker``: our factory where the engine would run ``EAGLEWorkerV2``."""
    engine_worker = original(algorithm, server_args)
    # By their names: importing the classes would load more. STANDALONE runs on the class for EAGLE, with a draft model
    # instead of a head.
    if engine_worker.__name__ not in ENGINE_WORKERS or algorithm.name not in ALGORITHMS:
        reason = f"{engine_worker.__name__} is not a worker that the plugin replaces"
        _first_ranks_logger().info(engine_serves(algorithm.name, "SGLang", [reason]))
        return engine_worker
    from eagle_plugin.sglang.support import worker_factory

    return worker_factory(algorithm.name, engine_worker)


def _first_ranks_logger() -> logging.Logger:
    """The logger of ours, which is silent in all ranks but the first; `eagle-plugin doctor` has no ranks."""
    from eagle_plugin.sglang.ranks import rank_logger

    try:
        return rank_logger(logger)
    except (RuntimeError, AttributeError):
        return logger


def _check_arguments(result: Any, server_args: Any) -> Any:
    """AFTER the engine has resolved its speculative flags: refuse a wrong head before any weight is loaded."""
    from eagle_plugin.sglang.preflight import check_launch

    check_launch(server_args)
    return result


def _resolve_block_arguments(original: Any, server_args: Any) -> None:
    """AROUND the engine's resolution of the flags of block drafters; the check of the drafter comes after it."""
    from eagle_plugin.sglang.preflight import check_launch, resolve_block_flags

    resolve_block_flags(original, server_args)
    check_launch(server_args)


def _add_middleware(server_args: Any, argv: Any) -> Any:
    """AFTER the launcher has read its flags; the processes that it starts do not read them again."""
    from eagle_plugin.sglang.request_fields import add_requests_middleware

    if os.environ.get(FOLDER):
        from eagle_plugin.sglang.traffic import add_middleware

        add_middleware(server_args)
    if os.environ.get(STORE):
        from eagle_plugin.runtime.collect_start import NO_HEAD, check_collecting

        asked = str(server_args.speculative_algorithm).upper()  # NEXTN is another name of EAGLE
        check_collecting([] if asked in (*ALGORITHMS, "NEXTN") else [NO_HEAD])
    add_requests_middleware(server_args)
    return server_args


def _check_request(result: Any, params: Any, vocab_size: int) -> Any:
    """AFTER the engine has checked the parameters of a request: what it says of its drafts."""
    from eagle_plugin.sglang.request_fields import check_request

    check_request(params)
    return result


def _auto_parameters(original: Any, server_args: Any, model_arch: str) -> Any:
    """AROUND the engine's choice of (steps, topk, draft tokens) when the user gave none."""
    from eagle_plugin.sglang.preflight import auto_parameters

    return auto_parameters(server_args, original(server_args, model_arch))


def _room_for_rounds(original: Any) -> int:
    """AROUND the number of slots of a request beyond the context length: all that a decode step may reserve.

    With pages of one token SGLang has room for one tree, and reserves for two: a request that comes near the context
    length would write past its row, and end the server (docs/upstream.md).
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    room: int = original()
    return max(room, get_alloc_reserve_per_decode()) if get_spec().speculative_algorithm in ALGORITHMS else room


def _slots_of_round(original: Any) -> int:
    """AROUND the number of slots that a decode step needs of a request, of which the engine reserves twice as many."""
    from eagle_plugin.sglang.decode_reserve import slots_of_round

    return slots_of_round(original())


def _update_weights(original: Any, manager: Any, request: Any) -> Any:
    """AROUND every update of weights, where our worker serves."""
    if not hasattr(manager.draft_worker, "weights_updated"):
        return original(manager, request)
    from eagle_plugin.sglang import weight_updates

    if original.__name__ == WEIGHTS_FROM[0]:
        return weight_updates.update_weights_from_disk(original, manager, request)
    if original.__name__ in WEIGHTS_FROM:
        return weight_updates.update_weights(original, manager, request)
    return weight_updates.begin_or_end(original, manager, request)


def _keep_overlap(original: Any, server_args: Any) -> None:
    """AROUND the step that switches overlap scheduling off on a CPU.

    On a CPU nothing overlaps and nothing gets faster; it is for tests of what a GPU runs.
    """
