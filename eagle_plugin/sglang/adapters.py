"""LoRA adapters of the target: which one applies to which rows of a tree forward. The head drafts without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode


class Adapters:
    """What the engine does for its own forwards when it makes their batch (``ForwardBatch.init_new``)."""

    def __init__(self, target_runner: Any) -> None:
        """target_runner: an SGLang ``ModelRunner``; without LoRA nothing is done."""
        self._manager = target_runner.lora_manager

    @property
    def are_served(self) -> bool:
        """Whether requests may have adapters."""
        return self._manager is not None

    def prepare(self, requests: list[Any], width: int) -> None:
        """Before a forward of the target over trees of `width` nodes, one tree for each of the engine's requests."""
        if self._manager is None:
            return
        names = [request.lora_id for request in requests]  # None: without an adapter
        self._manager.fetch_new_loras(set(names))
        self._manager.prepare_lora_batch(
            SimpleNamespace(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(names),
                spec_info=SimpleNamespace(draft_token_num=width),
                lora_ids=names,
            )
        )
