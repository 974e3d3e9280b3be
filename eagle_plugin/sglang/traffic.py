"""Puts the middleware of the capture into SGLang's HTTP server."""

from __future__ import annotations

import logging
import os
from typing import Any

from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.traffic.accepted_drafts import ACCEPTED_DRAFTS
from eagle_plugin.traffic.middleware import CaptureMiddleware
from eagle_plugin.traffic.recorder import check_writer
from eagle_plugin.traffic.served import ServedTarget
from eagle_plugin.traffic.settings import FOLDER, CaptureError, capture_settings

logger = logging.getLogger("eagle_plugin")

# Called once per request, when it is finished, and before its answer ends.
COUNT_DRAFTS = "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"

# Called when the server ends, and before the shutdown of its application.
KILL_ALL = "sglang.srt.utils.common.kill_process_tree"


def add_middleware(server_args: Any) -> None:
    """Add the middleware to the application that the launcher's process serves; nothing for other servers.

    Raises:
        StartRefused: the settings are wrong, or the writer cannot start.
    """
    try:
        settings = capture_settings()
        if settings is None:
            return
        if reason := other_server(server_args):
            raise CaptureError(f"{FOLDER} is set, but nothing can be captured with {reason}; unset one of the two")
        check_writer(settings)
    except CaptureError as error:
        raise StartRefused(error) from None
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    CaptureMiddleware.model = server_args.served_model_name or server_args.model_path
    CaptureMiddleware.served = _served(server_args)
    CaptureMiddleware.is_starting = staticmethod(is_starting)  # type: ignore[method-assign]
    app.add_middleware(CaptureMiddleware)
    # Here, and not with the other hooks: their targets are imported in all processes.
    HookRegistry.register(COUNT_DRAFTS, note_drafts, HookType.AFTER)
    HookRegistry.register(KILL_ALL, close_writer, HookType.BEFORE)
    HookRegistry.apply_hooks()


def is_starting() -> bool:
    """Whether the server is not up yet: what is asked then comes from the engine itself, such as its warm-up."""
    from sglang.srt.entrypoints.http_server import _global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    return bool(_global_state.tokenizer_manager.server_status == ServerStatus.Starting)


def close_writer(parent_pid: int | None, *given: Any, **named: Any) -> None:
    """BEFORE the engine kills the processes below one: the writer writes what is queued.

    A detached writer is below the server again where the server is process 1 of a container.
    """
    if parent_pid in (None, os.getpid()):
        CaptureMiddleware.close_all()


def note_drafts(result: Any, manager: Any, meta_info: dict[str, Any], *given: Any) -> None:
    """AFTER the engine has counted the rounds of a finished request; plain rounds are among those that accepted 0."""
    if rounds := meta_info.get("spec_correct_drafts_histogram"):
        ACCEPTED_DRAFTS.note(str(meta_info.get("id")), rounds)


def _served(server_args: Any) -> ServedTarget | None:
    """None with LoRA: an answer can be that of an adapter, which the digests of the target do not show."""
    if server_args.enable_lora or server_args.lora_paths:
        return None
    of = server_args
    return ServedTarget.of(of.model_path, of.revision, of.tokenizer_path, of.chat_template)


def other_server(server_args: Any) -> str | None:
    """The setting with which requests do not come to the application of the launcher's process."""
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() in ("1", "true"):
        return "SGLANG_RUST_SERVER"
    if server_args.tokenizer_worker_num > 1:  # further processes, which do not load plugins
        return f"--tokenizer-worker-num {server_args.tokenizer_worker_num}"
    flags = ("grpc_mode", "smg_grpc_mode", "encoder_only", "use_ray")
    return next((f"--{flag.replace('_', '-')}" for flag in flags if getattr(server_args, flag, False)), None)
