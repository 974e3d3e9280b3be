"""Runs the target over the rows of a step in vLLM, trees and prompts, by what was captured where it can."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from eagle_plugin.vllm.attention import give_rows
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.engine_graphs import graph_of_v1
from eagle_plugin.vllm.step_state import StepState


class TargetRunner(GPUModelRunner):
    """vLLM's runner, whose attention sees the ancestors of each node; `_prepare_inputs` of a subclass sets the step."""

    _state: StepState | None = None  # of the step that was prepared last
    _step: DecodeStep | None = None  # what was captured
    engine_graph = graph_of_v1

    def query_rows(self) -> tuple[Tensor, Tensor]:
        """Tokens [most] int32 and positions [most] int64 of the target's query rows, at fixed addresses."""
        return self.input_ids.gpu, self.positions

    def rotary_rows(self) -> Tensor:
        """Positions of the target's query rows as its rotary embedding reads them, at a fixed address: [most], or
        [axes, most] where rows of images have positions of several axes."""
        return self.mrope_positions.gpu if self.uses_mrope else self.positions

    def embedding_rows(self, n: int) -> Tensor:
        """Embeddings [n, H] of the target's query rows, at a fixed address."""
        embeddings: Tensor = self.inputs_embeds.gpu[:n]
        return embeddings

    def has_adapters(self) -> bool:
        """Whether a request of the batch has a LoRA adapter."""
        return bool(self.input_batch.lora_id_to_lora_request)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Give the builders the rows of this step."""
        state = self._state
        rows = None if state is None else state.batch.rows()
        builders = [group.get_metadata_builder() for groups in self.attn_groups for group in groups]
        give_rows(builders, rows)
        try:
            built = super()._build_attention_metadata(*args, **kwargs)
        finally:
            give_rows(builders, None)
        if state is not None:
            state.layers = built[0]
            if self._step is not None:
                self._step.begin(state.batch, state.layers, state.is_plain)
        return built

    def _model_forward(
        self,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the target by what was captured, if the rows of this step are trees of one captured shape, or plain."""
        step, state = self._step, self._state
        # A multimodal target is given embeddings; those of trees are made again by what was captured.
        can_embed = inputs_embeds is None or self.supports_mm_inputs
        if step is not None and state is not None and can_embed:
            is_served = get_forward_context().attn_metadata is state.layers  # else the engine warms up, or we measure
            if is_served and step.can_verify():
                return step.verify()
        return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
