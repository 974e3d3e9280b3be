"""What is checked in the launcher, before any process is started or weight loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from eagle_plugin.engines.sglang.takeover import HEAD_ARCHITECTURES, flags_left_alone
from eagle_plugin.heads.checkpoint import HeadError, check_head, read_config

logger = logging.getLogger("eagle_plugin")
# Measured on 2 CPU cores: a deeper tree costs more draft steps than it gains (docs/performance.md).
CPU_PARAMETERS = (2, 4, 8)


def check_launch(server_args: Any) -> None:
    """Refuse a draft head that does not fit its target.

    Only folders on this disk are checked, and only when our worker will serve them: a name on a model hub is loaded
    (and then checked by its shapes) by the engine.

    Raises:
        SystemExit: with one sentence that names what was found, what was wanted and the fix.
    """
    from sglang.srt.arg_groups.model_override_base import resolved_view

    arguments = resolved_view(server_args)
    algorithm = arguments.speculative_algorithm
    target, head = arguments.model_path, arguments.speculative_draft_model_path
    if algorithm not in ("EAGLE", "EAGLE3") or flags_left_alone(arguments):
        return
    if head is None or not Path(target).is_dir():
        return
    if not Path(head).is_dir():
        if Path(head).is_absolute() or head.startswith("."):
            raise SystemExit(
                f"eagle-plugin: --speculative-draft-model-path {head} is not a folder; "
                "give the folder that holds the head's config.json and model.safetensors"
            )
        return
    try:
        architecture = (read_config(head).get("architectures") or ["?"])[0]
        if architecture in HEAD_ARCHITECTURES:
            for warning in check_head(target, head, algorithm=algorithm).warnings:
                logger.warning("eagle-plugin: %s", warning)
    except HeadError as error:
        raise SystemExit(f"eagle-plugin: {error}") from error


def auto_parameters(server_args: Any) -> tuple[int, int, int] | None:
    """(steps, topk, draft tokens) on a CPU when the user gave none; None leaves the choice to the engine."""
    from sglang.srt.arg_groups.model_override_base import resolved_view

    arguments = resolved_view(server_args)
    if arguments.device != "cpu" or arguments.speculative_algorithm not in ("EAGLE", "EAGLE3"):
        return None
    return CPU_PARAMETERS if arguments.page_size in (1, None) else None
