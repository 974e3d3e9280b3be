"""LoRA adapters of the target: which one applies to which rows of a tree forward. The head drafts without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from eagle_plugin.sglang.releases import prepare_adapters_in_place

# The kernels, SGLang's default, that read which rows have which adapter in memory at fixed addresses, for trees of any
# width. Those of "triton" take one width there, and "torch_native" reads on the host.
CAPTURED = "csgmv"


class Adapters:
    """What the engine does for its own forwards when it makes their batch (``ForwardBatch.init_new``).

    A captured forward reads what was prepared last, in memory that `use_static_memory` makes.
    """

    def __init__(self, target_runner: Any) -> None:
        """target_runner: an SGLang ``ModelRunner``; without LoRA nothing is done."""
        self._manager = target_runner.lora_manager

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward with adapters may be captured; True without LoRA."""
        return self._manager is None or not unsupported_graphs(self._manager)

    def use_static_memory(self, most: int, width: int) -> None:
        """Prepare batches of up to `most` requests, with trees of up to `width` nodes, in place from now on."""
        if self._manager is not None:
            prepare_adapters_in_place(self._manager, most, width)

    def prepare(self, requests: list[Any], width: int, padded_b: int) -> None:
        """Before a forward of the target over trees of `width` nodes, one tree for each of the engine's requests.

        Places that pad the batch to padded_b have no adapter.
        """
        if self._manager is None:
            return
        names = [request.lora_id for request in requests]  # None: without an adapter
        self._manager.fetch_new_loras(set(names))
        self._prepare(names + [None] * (padded_b - len(names)), width)

    def prepare_padding(self, padded_b: int, width: int) -> None:
        """The same of a batch without a request."""
        if self._manager is not None:
            self._prepare([None] * padded_b, width)

    def forget(self) -> None:
        """Nothing is prepared: a forward that is not captured has no adapter."""
        if self._manager is not None:
            self._manager.lora_backend.reset_batch_state()

    def _prepare(self, names: list[str | None], width: int) -> None:
        self._manager.prepare_lora_batch(
            SimpleNamespace(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(names),
                spec_info=SimpleNamespace(draft_token_num=width),
                lora_ids=names,
            )
        )


def unsupported_graphs(manager: Any) -> list[str]:
    """Why no forward with the adapters of this ``LoRAManager`` is captured; empty where one is."""
    backend = manager.lora_backend
    if backend.name != CAPTURED:
        return [f"--lora-backend {backend.name}: on GPUs LoRA is served with {CAPTURED}"]
    if backend.is_moe_lora:
        return ["--enable-lora: adapters of experts are served on CPUs only"]
    return []


def unsupported_adapters(target_runner: Any) -> list[str]:
    """Why trees are not served with this target's adapters; empty where they are, or has none.

    On a GPU a target outside of graphs would be slower than the engine's own worker.
    """
    manager = target_runner.lora_manager
    return [] if manager is None or target_runner.device == "cpu" else unsupported_graphs(manager)
