"""Refuses what a running server is asked for and only the rounds of the engine's own worker do."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

CHECK_MASKS = "sglang.srt.speculative.spec_sampling_mask.validate_spec_sampling_mask_request"
STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
CHECK_THRESHOLD = f"{STATE}._validate_accept_threshold"
NO_MASKS = (
    "return_sampling_mask is not served with the plugin's draft trees; leave it out, or start the server with "
    "EAGLE_PLUGIN=0"
)


def refuse_requests() -> None:
    """Have this process refuse them; to be called where the worker serves (see `metrics`)."""
    source = HookSource("eagle_plugin", "eagle-plugin")
    HookRegistry.register(CHECK_MASKS, refuse_masks, HookType.AFTER, source=source)
    HookRegistry.register(CHECK_THRESHOLD, check_threshold, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()


def refuse_masks(refused: str | None, request: Any, spec_algorithm: Any) -> str:
    """AFTER the check of a request that wants sampling masks: the engine takes it with block drafters.

    Its answer has the status 400.
    """
    return refused or NO_MASKS


def check_threshold(original: Any, manager: Any, key: str, value: Any) -> None:
    """AROUND the check of a threshold of acceptance that ``/set_internal_state`` brings: our rounds accept exactly.

    Raises:
        UpdateRejected: it is not 1; the engine logs the sentence and answers that nothing was updated.
    """
    if value != 1.0:
        raise UpdateRejected(f"eagle-plugin: {key} {value} is not served: it changes the output's distribution")
    original(manager, key, value)
