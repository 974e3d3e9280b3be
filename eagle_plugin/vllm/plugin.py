"""Entry point ``vllm.general_plugins``: our worker serves the methods of `mtp_support.METHODS`.

vLLM calls :func:`register` in every process that it starts, sometimes twice. What serves is decided once, when the
launcher has the whole configuration; the other processes get the decision with the configuration.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.runtime.startup import StartRefused, may_serve, switched_off
from eagle_plugin.traffic.settings import FOLDER
from eagle_plugin.vllm import version

logger = logging.getLogger("vllm.eagle_plugin")  # below vLLM's logger, so that its handlers print our lines

_MARK = "_eagle_plugin_original"


def register() -> None:
    """Hook into vLLM's configuration, unless ``EAGLE_PLUGIN=0`` or the version is not a tested one."""
    if not may_serve("vLLM", version.installed(), version.TESTED, logger, _differences):
        return
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams

    from eagle_plugin.vllm.plugin_config import reserve_draft_slots

    _wrap(type(current_platform), "check_and_update_config", _after_platform)
    _wrap(SamplingParams, "_validate_spec_decode", _validate)
    _wrap(SchedulerConfig, "get_scheduler_cls", _with_scheduler)
    _wrap(VllmConfig, "use_v2_model_runner", _runner_for_trees)
    _wrap(VllmConfig, "num_lookahead_tokens", reserve_draft_slots)
    # Who makes a configuration from flags has this module, and calls us; other processes need not import it.
    if arguments := sys.modules.get("vllm.engine.arg_utils"):
        _wrap(arguments.EngineArgs, "create_speculative_config", _explain)
        _wrap(arguments.EngineArgs, "from_cli_args", _add_middleware)


def _differences() -> Sequence[object]:
    """What the installed vLLM has otherwise than the adapter wants it; nothing of it is imported."""
    from eagle_plugin.runtime.engine_contract import installed_differences
    from eagle_plugin.vllm.engine_contract import CONTRACT

    return installed_differences("vllm", Path(__file__).parent, CONTRACT)


def _wrap(owner: type, name: str, hook: Any) -> None:
    """Replace a method or property by hook(original, *arguments), once: in `owner`, or in the base that defines it."""
    owner = next(base for base in owner.__mro__ if name in base.__dict__)
    found = owner.__dict__[name]
    original = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    if hasattr(original, _MARK):
        return

    def hooked(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    setattr(hooked, _MARK, original)
    setattr(owner, name, type(found)(hooked) if isinstance(found, classmethod | property) else hooked)


def _after_platform(original: Any, platform: type, vllm_config: Any) -> None:
    """AROUND the platform's changes to the configuration, which come last: choose who serves."""
    original(platform, vllm_config)
    if switched_off():  # set after a first engine of this process
        return
    from eagle_plugin.vllm.support import choose_worker

    try:
        choose_worker(vllm_config)
    except UserError as error:
        raise StartRefused(error) from None


def _explain(original: Any, arguments: Any, *given: Any, **named: Any) -> Any:
    """AROUND the speculative configuration, which reads the head's config.json: our sentence for a head's folder that
    vLLM cannot read, instead of its traceback."""
    try:
        return original(arguments, *given, **named)
    except Exception:
        from eagle_plugin.vllm.support import explain_refusal

        if not switched_off() and (error := explain_refusal(arguments)):
            raise StartRefused(error) from None
        raise


def _add_middleware(original: Any, owner: type, args: Any, *given: Any, **named: Any) -> Any:
    """AROUND ``EngineArgs.from_cli_args``, which every API server calls before it makes its application."""
    from eagle_plugin.vllm.request_fields import add_requests_middleware

    if os.environ.get(FOLDER):
        from eagle_plugin.vllm.traffic import add_middleware

        add_middleware(args)
    add_requests_middleware(args)
    return original(owner, args, *given, **named)


def _with_scheduler(original: Any, scheduler_config: Any) -> Any:
    """AROUND the choice of the scheduler's class, in the process that runs it: rounds are counted there, grammars
    followed along trees, and steps scheduled ahead for the shapes that the worker chooses."""
    chosen = original(scheduler_config)
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    from eagle_plugin.vllm.grammar import keep_nodes, mask_nodes, note_parents
    from eagle_plugin.vllm.metrics import watch_rounds
    from eagle_plugin.vllm.scheduled_shapes import note_shape, schedule_shape

    _wrap(Scheduler, "make_spec_decoding_stats", watch_rounds)
    _wrap(Scheduler, "update_draft_token_ids", note_parents)
    _wrap(Scheduler, "update_draft_token_ids_in_output", note_parents)
    _wrap(Scheduler, "update_from_output", note_shape)
    _wrap(AsyncScheduler, "_update_after_schedule", schedule_shape)
    _wrap(StructuredOutputManager, "validate_tokens", keep_nodes)
    _wrap(StructuredOutputManager, "grammar_bitmask", mask_nodes)
    return chosen


def _runner_for_trees(original: Any, vllm_config: Any) -> bool:
    """AROUND the choice of the model runner, in every process: where our worker serves, it is as we have chosen."""
    from eagle_plugin.vllm.plugin_config import plugin_config

    ours = plugin_config(vllm_config.speculative_config)
    chosen: bool = original(vllm_config) if ours is None else ours.v2
    return chosen


def _validate(original: Any, params: Any, speculative_config: Any) -> None:
    """AROUND the check of a request's sampling parameters: ours serves min_p and logit_bias with drafts too, and reads
    what the request says of its drafts."""
    from eagle_plugin.vllm.plugin_config import is_served
    from eagle_plugin.vllm.request_fields import check_request

    check_request(params)
    if not is_served(speculative_config):
        original(params, speculative_config)
