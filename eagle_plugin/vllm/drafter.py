"""vLLM's proposers of its V1 model runner with our drafting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.dp_utils import skip_dp_coordination

from eagle_plugin.heads.block_config import METHOD
from eagle_plugin.vllm import mtp_support
from eagle_plugin.vllm.block_drafts import BlockForwards
from eagle_plugin.vllm.head_forwards import HeadForwards

# What comes after the class below where it is used: one of vLLM's proposers.
Engine: Any = object
if TYPE_CHECKING:
    Engine = Any


class KnownTokens:
    """The tokens of a vLLM ``CachedRequestState``, whose prompt may be embeddings."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._unknown: int = request.num_prompt_tokens if request.prompt_token_ids is None else 0

    def get_token_id(self, place: int) -> int:
        """The token at a place of the sequence; 0 where nobody knows it: only a head reads it, for its drafts."""
        return 0 if place < self._unknown else self._request.get_token_id(place)


class TreeDrafting(HeadForwards, Engine):
    """A mixin for vLLM's proposers (weights, buffers, warm-up) with our drafting."""

    is_idle = False  # while its engine runs the target over nothing, beside the steps of other engines

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner

    def _get_model(self) -> Any:
        """Load the head; the engine calls this as a part of load_model."""
        return self.read_head(super()._get_model)

    def load_model(self, target_model: Any) -> None:
        """Load the head as the engine does, and complete it."""
        super().load_model(target_model)
        self.complete_head()

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Say what to do about a head whose layers got KV caches of several groups, where the engine only asserts."""
        self.check_cache_groups(kv_cache_config.kv_cache_groups)
        super().validate_same_kv_cache_group(kv_cache_config)

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """Capture no graphs of the head: the engine's are for its own drafting, ours would never be replayed."""
        super().initialize_cudagraph_keys(CUDAGraphMode.NONE)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Run the head over nothing, to warm it up, without asking the other engines of a server as the engine does: it
        has no experts. An idle engine does not run it, so that those with requests wait for the target alone."""
        if not self.is_idle:
            with skip_dp_coordination():
                super().dummy_run(*args, **kwargs)

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own drafting yields a chain; a caller of it would get another draft."""
        raise RuntimeError("vLLM called propose() on the plugin's drafter; it drafts by draft_tree()")

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Tensor, requests: Any, gpu_input_batch: Any, discard_request_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As the engine does, but after a part of a prompt comes the next token of the prompt.

        The engine gives the last one of the whole prompt, which the head would read in the part's last row. A prompt of
        embeddings has no tokens: there the engine raises.
        """
        prompts = np.flatnonzero(self._runner.discard_request_mask.np[: gpu_input_batch.num_reqs])
        if sampled_token_ids.shape[1] == 1 and not len(prompts):  # a step without trees: one token each
            tokens = sampled_token_ids[:, 0].int()
            return tokens, torch.ones_like(tokens)
        if any(requests[name].prompt_token_ids is None for name in gpu_input_batch.req_ids):
            requests = {name: KnownTokens(requests[name]) for name in gpu_input_batch.req_ids}
        tokens, counts = super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )
        for i in prompts:
            read = int(self._runner.optimistic_seq_lens_cpu[i])
            tokens[i] = requests[gpu_input_batch.req_ids[i]].get_token_id(read)
        return tokens, counts


class TreeProposer(TreeDrafting, EagleProposer):
    """Of EAGLE heads, those with masked rows included."""


class LayerProposer(TreeDrafting, EagleProposer):
    """Of a target's own layers for multi-token prediction."""

    uses_mrope: bool

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        """Let the engine warm the layers up, and compile them, with what we give them: tokens, and one position of
        each. Beside a target with images it would give embeddings and positions of three axes."""
        super().__init__(vllm_config, device, runner)
        self.supports_mm_inputs = False
        if self.uses_mrope:
            self.uses_mrope = False
            self.positions = torch.zeros(self.max_positions, dtype=torch.int64, device=device)


class BlockProposer(BlockForwards, TreeDrafting, DFlashProposer):
    """Of block drafters: for one of DSpark vLLM has no proposer (`block_support.plan_as_dflash`)."""


def proposer_of(vllm_config: Any, device: torch.device, runner: Any) -> TreeDrafting:
    """The proposer of a served configuration."""
    kinds = {METHOD: BlockProposer, mtp_support.METHOD: LayerProposer}
    return kinds.get(vllm_config.speculative_config.method, TreeProposer)(vllm_config, device, runner)
