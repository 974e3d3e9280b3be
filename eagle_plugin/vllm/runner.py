"""Serves vLLM's steps with draft trees: the engine prepares and runs the batch; verifying and drafting are ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from eagle_plugin.vllm.backend import forget_caches, tree_attention
from eagle_plugin.vllm.drafter import TreeDrafting, proposer_of
from eagle_plugin.vllm.sampling import RequestDraws
from eagle_plugin.vllm.step_state import StepState, has_grammar
from eagle_plugin.vllm.target_runner import TargetRunner
from eagle_plugin.vllm.tree_steps import TreeSteps


class TreeModelRunner(TreeSteps, TargetRunner):
    """One step: put the trees into the batch, run the target, verify, draft the next trees.

    The runner of a GPU; `cpu_worker.TreeCPUModelRunner` is that of a CPU.
    """

    drafter: TreeDrafting
    _fits = True  # whether the head has positions for a tree of each request of the step

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._begin(vllm_config)
        self.drafter = proposer_of(vllm_config, device, self)
        engine = vllm_config.parallel_config.data_parallel_index
        self._draws = RequestDraws(self.input_batch.vocab_size, device, self.model_config.seed, engine)
        self._sampled: StepState | None = None  # of the step that was sampled last
        assert self.draft_token_ids_cpu is not None
        self._drafts_on_host: Tensor = self.draft_token_ids_cpu.view(-1)  # pinned; room for the drafts of a step
        # With drafts vLLM itself leaves min_p and logit_bias out.
        self.input_batch.logitsprocs = LogitsProcessors(
            processor(vllm_config, device, PIN_MEMORY) for processor in BUILTIN_LOGITS_PROCESSORS
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models over our attention backend, which replaces the platform's while they are built."""
        with tree_attention(self.vllm_config):
            super().load_model(*args, **kwargs)
        self._use_models(self.get_model())

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches as the engine does, and note where the target's are."""
        forget_caches(self.vllm_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        # One state per request, not one per drafted token; the engine may have made the batch anew until now.
        self.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
            self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, PIN_MEMORY
        )
        self._use_caches()

    def _update_states(self, scheduler_output: Any) -> Any:
        """Forget the trees of requests that leave the batch as well; this is called in steps without tokens too."""
        self._look_around(scheduler_output, self.requests)
        self._draws.forget(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        """Prepare as the engine does, then put the tree's tokens and positions into their rows."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        counts = np.array(prepared[1].num_draft_tokens, dtype=np.int64)
        prefix_lens = self.num_computed_tokens[: len(counts)]
        names = list(self.input_batch.req_ids)
        constrained = [i for i, name in enumerate(names) if has_grammar(self.requests[name])]
        computed = int(self.input_batch.num_computed_tokens_cpu[: len(counts)].sum())
        in_prompts = self.discard_request_mask.np[: len(counts)].copy()
        after = self._after_prompts(len(counts))
        self._state = self._read_step(
            scheduler_output,
            names,
            counts,
            num_scheduled_tokens,
            prefix_lens,
            computed,
            in_prompts,
            constrained,
            in_text=bool(after.all()),
        )
        positions = self.positions[: scheduler_output.total_num_scheduled_tokens]
        in_chains = positions.clone() if self.uses_mrope else None  # where the engine has put the rows
        self._state.batch.put_trees(self.input_ids.gpu, self.positions)
        if self.enable_prompt_embeds:
            self._mark_tokens(np.repeat(after, num_scheduled_tokens))
        if in_chains is not None:  # all axes of a token of text move alike
            self.mrope_positions.gpu[:, : len(positions)] += positions - in_chains
        return prepared

    def _after_prompts(self, b: int) -> np.ndarray:
        """The requests all of whose rows are after their prompts, [b] bool."""
        after: np.ndarray = self.input_batch.num_computed_tokens_cpu[:b] >= self.input_batch.num_prompt_tokens[:b]
        return after

    def _mark_tokens(self, after: np.ndarray) -> None:
        """Say of the rows after the prompts, [N] bool, that they are tokens, no embeddings.

        A step ahead, the engine has looked at places that no text has reached where drafts were rejected.
        """
        self.is_token_ids.np[: len(after)] |= after
        self.is_token_ids.copy_to_gpu(len(after))

    def _get_valid_sampled_token_count(self) -> list[int]:
        """As the engine reads them where it is a step ahead: the tokens that each request of the step before got."""
        counts: list[int] = super()._get_valid_sampled_token_count()
        if counts:
            self._shapes.observe_step_before(counts)
        return counts

    def _sample(self, logits: Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Verify every request's tree; a request without drafts has a tree of one node."""
        state = self._sampled = self._state
        assert state is not None
        self.input_batch.update_async_output_token_ids()
        metadata = self.input_batch.sampling_metadata
        requests = [self.requests[name] for name in state.names]
        state.draws = self._draws.of(metadata, state.names)
        output, state.accepted = self._verifier.verify(
            state.batch, logits, metadata, state.draws, requests, state.layers, self._step
        )
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Update the batch as the engine does, but without generators: it rewinds them; here they only hold seeds."""
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            kept = super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators
        if not self.use_async_scheduling:
            self._shapes.observe([len(tokens) for tokens in kept[3]])
        elif self._state is not None and not len(self._state.batch.trees):  # else the host does not know yet
            self._shapes.observe([int(not one) for one in self._state.in_prompts])
        return kept

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Whether the engine asks for drafts: of every step, which the head reads where it drafts nothing too.

        Else it would miss tokens of all requests beside one that is as long as it serves.
        """
        self._fits = super()._input_fits_in_drafter(common_attn_metadata)
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Tensor,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Tensor:
        """Draft the next trees of the batch; returns their tokens [b, W - 1], whose links are kept here."""
        state = self._state
        assert state is not None
        next_tokens, counts = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        self._copy_valid_sampled_token_count(next_tokens, counts)
        n = scheduler_output.total_num_scheduled_tokens
        ids, positions = self.input_ids.gpu[:n], self.positions[:n]
        parts = [part[:n] for part in aux_hidden_states or [hidden_states]]
        firsts = self.input_batch.num_computed_tokens_cpu[: state.batch.b].tolist()
        most = None if self._fits else self.effective_drafter_max_model_len
        return self._draft(state, next_tokens, ids, positions, parts, firsts, not self._fits, most)

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        """Copy the drafts as the engine does, but a step ahead for grammars alone: penalties read them on the device.

        They lie side by side on the host, however many each request has: a copy into a part of each row would go
        through memory that is not pinned, and the host would wait for the whole drafting.
        """
        drafts = self._draft_token_ids
        assert isinstance(drafts, Tensor)
        if self.use_async_scheduling and not scheduler_output.has_structured_output_requests:
            self.prev_num_spec_tokens = drafts.shape[1]
            return
        self.draft_token_ids_cpu = self._drafts_on_host[: drafts.numel()].view(drafts.shape)
        super()._copy_draft_token_ids_to_cpu(scheduler_output, zeros_only)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step as the engine does; a scheduler that is ahead hears of the shape that we would draft now."""
        ran = self.execute_model_state  # None without tokens
        output = super().sample_tokens(grammar_output)
        if self._features is not None and ran is not None and self._state is not None:
            parts = ran.aux_hidden_states or [ran.hidden_states]
            self._features.step(self._state, self.input_ids.gpu, self.positions, parts, ran.hidden_states)
        if isinstance(output, AsyncGPUModelRunnerOutput):
            self._tell_shape(output._model_runner_output)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the scheduler, with the links of the trees whose grammar it follows."""
        drafts, state = super().take_draft_token_ids(), self._sampled
        return drafts if drafts is None or state is None else state.with_links(drafts)
