"""Serves SGLang's scheduler with block drafters (DFlash, DSpark): the rounds of `TreeWorker`, with another drafter."""

from __future__ import annotations

from typing import Any

from eagle_plugin.core.shape import Shape
from eagle_plugin.sglang.block_drafter import BlockDrafter
from eagle_plugin.sglang.block_flags import block_shape
from eagle_plugin.sglang.worker import TreeWorker


class BlockWorker(TreeWorker):
    """DFlash and DSpark with dynamic draft trees."""

    drafter_class = BlockDrafter

    def _caps(self, server_args: Any) -> Shape:
        config = self._draft_worker.draft_runner.model.config.to_dict()
        return block_shape(server_args, self.speculative_num_draft_tokens, config)
