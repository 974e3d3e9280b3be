"""Entry point ``sglang.srt.plugins``: put our worker behind the built-in names EAGLE and EAGLE3.

SGLang calls :func:`register` in every process that it starts (launcher, scheduler, detokenizer). It swallows whatever
a plugin raises, so nothing here may fail half way: either both hooks are registered or none.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import Any

import eagle_plugin

logger = logging.getLogger("eagle_plugin")

TESTED_VERSIONS = ("0.5.23",)
ALGORITHMS = ("EAGLE", "EAGLE3")

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
RESOLVE_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
AUTO_PARAMETERS = "sglang.srt.arg_groups.speculative_hook._auto_choose_speculative_params"


def register() -> None:
    """Register the hooks of the take-over, unless ``EAGLE_PLUGIN=0`` or the SGLang version is not a tested one."""
    if os.environ.get("EAGLE_PLUGIN", "1") == "0":
        logger.info("eagle-plugin is switched off by EAGLE_PLUGIN=0")
        return
    version = metadata.version("sglang")
    if version not in TESTED_VERSIONS:
        logger.warning(
            "eagle-plugin %s leaves SGLang %s untouched: it was tested with SGLang %s only; "
            "install that version or a newer eagle-plugin",
            eagle_plugin.__version__,
            version,
            ", ".join(TESTED_VERSIONS),
        )
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CREATE_WORKER, _create_worker, HookType.AROUND)
    HookRegistry.register(RESOLVE_ARGUMENTS, _check_arguments, HookType.AFTER)
    HookRegistry.register(AUTO_PARAMETERS, _auto_parameters, HookType.AROUND)


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """AROUND ``SpeculativeAlgorithm.create_worker``: our factory where the engine would run ``EAGLEWorkerV2``."""
    engine_worker = original(algorithm, server_args)
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    # STANDALONE runs on the same engine class but has no draft head to speak of.
    if engine_worker is not EAGLEWorkerV2 or algorithm.name not in ALGORITHMS:
        return engine_worker
    from eagle_plugin.engines.sglang.takeover import worker_factory

    return worker_factory(algorithm.name, engine_worker)


def _check_arguments(result: Any, server_args: Any) -> Any:
    """AFTER the engine has resolved its speculative flags: refuse a wrong head before any weight is loaded."""
    from eagle_plugin.engines.sglang.preflight import check_launch

    check_launch(server_args)
    return result


def _auto_parameters(original: Any, server_args: Any, model_arch: str) -> Any:
    """AROUND the engine's choice of (steps, topk, draft tokens) when the user gave none."""
    from eagle_plugin.engines.sglang.preflight import auto_parameters

    return auto_parameters(server_args) or original(server_args, model_arch)
