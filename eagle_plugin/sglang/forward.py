"""One forward of a model over the rows of draft trees, past the engine's planning, which knows no trees."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from torch import Tensor

from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.data_parallel import spread_rows
from eagle_plugin.sglang.releases import forward_of


class TreeForward:
    """The forwards of one SGLang ``ModelRunner`` over trees: pure functions of the tensors that they are given."""

    def __init__(self, runner: Any, attention: TreeAttention, replicas: int = 1) -> None:
        """replicas: ranks of data-parallel attention, which run every forward together."""
        self._runner, self._attention, self._replicas = runner, attention, replicas
        self._has_axes: bool = runner.model_config.model_is_mrope

    def __call__(
        self,
        batch: RoundBatch,
        *,
        mode: ForwardMode,
        hidden: CaptureHiddenMode,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        info: Any,
        logits_buffer: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """Run the model over tokens, positions, slots [N] int64; info is a spec input with ``tree_rows``.

        logits_buffer [N, vocabulary] float32, if given, receives the logits. embeddings [N, H]: of the tokens, for a
        model without a table of them.
        """
        forward_batch = ForwardBatch(
            forward_mode=mode,
            batch_size=batch.padded_b,
            input_ids=tokens,
            req_pool_indices=batch.table_rows,
            seq_lens=batch.prefix_lens,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            spec_info=info,
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=hidden,
            next_token_logits_buffer=logits_buffer,
        )
        if self._has_axes:
            forward_batch.mrope_positions = batch.rotary_axes(positions)
        if self._replicas > 1:
            spread_rows(self._runner, forward_batch, self._replicas)
        model = self._runner.model
        with forward_of(model, self._attention, forward_batch):
            if embeddings is not None:
                return model.forward(tokens, positions, forward_batch, embeddings)
            return model.forward(tokens, positions, forward_batch)
