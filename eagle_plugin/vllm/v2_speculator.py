"""vLLM's speculator of its V2 model runner with our drafting."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from eagle_plugin.vllm.decode_step import side_by_side
from eagle_plugin.vllm.head_forwards import HeadForwards


class TreeSpeculator(HeadForwards, DraftModelSpeculator):
    """The head of a `V2TreeModelRunner`, which drafts with it."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device)
        self._runner = runner
        self.draft_logits = None  # our verification reads no distributions of the head

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Load the head as the engine does for its own speculator."""
        model: nn.Module = self.read_head(partial(load_eagle_model, target_model, self.vllm_config))
        return model

    def load_model(self, target_model: nn.Module) -> None:
        """Load the head as the engine does, and complete it."""
        super().load_model(target_model)
        self._draft_attn_layer_names = self.draft_attn_layer_names
        self.complete_head()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No graphs of the engine's drafting, which is never called."""

    def capture(self) -> None:
        """The same."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """The drafted tokens of the next trees, [b, num_speculative_steps] int64, zeros after the last.

        num_speculative_tokens: 0 where no request can use drafts; the head reads the step all the same.
        """
        parts = aux_hidden_states or [last_hidden_states]
        if dummy_run:
            self._warm_up(input_batch.num_tokens, parts)
            return self.draft_tokens[: input_batch.num_reqs]
        slots = input_batch.idx_mapping
        next_tokens = torch.where(num_sampled > 0, last_sampled[slots, 0], next_prefill_tokens[0, slots].long())
        self._runner.keep_states(input_batch, parts, last_hidden_states)
        drafted = self._runner.draft(input_batch, next_tokens, parts, plainly=num_speculative_tokens == 0)
        found = self.draft_tokens[: len(drafted)]  # the engine writes into what it gets: not a part of the tree
        found.zero_()
        found[:, : drafted.shape[1]] = drafted
        return found

    @torch.inference_mode()
    def _warm_up(self, n: int, parts: list[Tensor]) -> None:
        """Run the head once over n rows without caches: what memory a step takes is measured so."""
        tokens = torch.zeros(n, dtype=torch.int32, device=self.device)
        features = side_by_side([part[:n] for part in parts])
        with set_forward_context(None, self.vllm_config, num_tokens=n):
            normed, _ = self.model(
                input_ids=tokens, positions=tokens.long(), hidden_states=self._combined(features), inputs_embeds=None
            )
        self._logits(normed[: self.max_num_reqs])
