"""LoRA adapters in captured forwards of the target.

vLLM writes which adapter applies to which row before every step, to fixed addresses, where the adapters' weights are
too. What the host reads while it launches vLLM's kernels is a constant of a graph: whether any row has an adapter, and
with --specialize-active-lora how many adapters the rows have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import envs
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.lora.request import LoRARequest


def can_capture_adapters(runner: Any) -> bool:
    """Whether a forward of this runner's target, which serves LoRA, may be captured.

    Only vLLM's kernels for GPUs read all of a step on the device. Those for experts, and adapters on a stream of their
    own, are left to vLLM's own graphs.
    """
    layers = [layer for layer in runner.get_model().modules() if isinstance(layer, BaseLayerWithLoRA)]
    on_device = all(isinstance(layer.punica_wrapper, PunicaWrapperGPU) for layer in layers)
    return on_device and not runner.model_config.is_moe and not envs.VLLM_LORA_ENABLE_DUAL_STREAM


class TargetAdapters:
    """What was captured with adapters, and what without, as vLLM's own graphs are (``cudagraph_specialize_lora``)."""

    def __init__(self, runner: Any) -> None:
        """runner: one of ours that serves LoRA."""
        self._runner = runner
        self._most: int = runner.lora_config.max_loras
        self.cases = (True, False) if runner.compilation_config.cudagraph_specialize_lora else (True,)
        self._selected: bool | None = None

    def case(self) -> bool:
        """Which of `cases` serves the step that vLLM has prepared: one with adapters serves every step."""
        if len(self.cases) == 1 or self._selected is not None:
            return self._selected is not False
        has_adapters: bool = self._runner.has_adapters()
        return has_adapters

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let vLLM have as many adapters as a step can have. Afterwards it has none, and loads those that it needs."""
        runner = self._runner
        # After an exchange of the head there may be some of the same numbers.
        runner.maybe_remove_all_loras(runner.lora_config)
        with runner.maybe_setup_dummy_loras(runner.lora_config):
            yield

    @contextmanager
    def selected(self, rows: int, case: bool) -> Iterator[None]:
        """Let vLLM prepare a step of so many rows, with all kinds of rows, or without an adapter.

        All kinds are as many as there can be of so many requests, so that what is captured reads them all.
        """
        kinds = self._most + 1 if case else 1  # kind 0: without an adapter
        row_kinds = tuple(i % kinds for i in range(rows))
        adapters = {LoRARequest(f"adapter {i}", i, "of no file") for i in row_kinds if i}
        self._runner._set_active_loras(row_kinds, row_kinds, adapters)
        self._selected = case
        try:
            yield
        finally:
            self._selected = None
