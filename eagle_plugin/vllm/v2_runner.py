"""Serves the steps of vLLM's V2 model runner with draft trees: the engine prepares and runs the batch; verifying and
drafting are ours. `runner` does the same with the V1 runner."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.accept import accepted_rows
from eagle_plugin.vllm.attention import give_rows
from eagle_plugin.vllm.backend import forget_caches, tree_attention
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.engine_graphs import graph_of_v2
from eagle_plugin.vllm.logits import node_rows
from eagle_plugin.vllm.shapes import RoundShapes
from eagle_plugin.vllm.step_state import StepState
from eagle_plugin.vllm.tree_steps import TreeSteps
from eagle_plugin.vllm.v2_sampling import changes_at_nodes, draws_of, output_logprobs, processed, token_by_token
from eagle_plugin.vllm.v2_speculator import TreeSpeculator
from eagle_plugin.vllm.verifier import plainly, roots_only


class Blocks(NamedTuple):
    """What `DeferredTokens` reads of a request."""

    block_ids: list[list[int]]  # by group of caches


class V2TreeModelRunner(TreeSteps, GPUModelRunner):
    """One step: put the trees into the batch, run the target, verify, draft the next trees.

    What a request has accepted is on the device, where the engine prepares the next step from it; the host knows it a
    step later. The runner of a GPU; `cpu_worker.V2TreeCPUModelRunner` is that of a CPU.
    """

    drafter: TreeSpeculator
    engine_graph = graph_of_v2
    _had_trees = False  # whether the last step verified any
    _logits_rows: np.ndarray  # [b]: of each request of a step
    _moved: Tensor | None = None  # [N]: how far a step's rows are from where a chain has them; with several axes only
    _draws: tuple[bytes, tuple[SamplingParams, Tensor | None]] | None = None  # of the slots of a batch

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._begin(vllm_config)
        self.use_async_scheduling: bool = vllm_config.scheduler_config.async_scheduling
        self.speculator = self.drafter = TreeSpeculator(vllm_config, device, self)
        self._with_grammar: set[str] = set()  # requests
        self._blocks: dict[str, Blocks] = {}  # of requests
        self._scheduled: Any = None  # what is scheduled in the step that is prepared
        self._prepared: StepState | None = None  # a step until its forward
        # What the host will know of the last step and of the one before, where the scheduler is ahead.
        self._ended: tuple[RoundShapes, AsyncOutput] | None = None
        self._ended_before: tuple[RoundShapes, AsyncOutput] | None = None
        self._sampled: StepState | None = None  # of the step that was sampled last
        self._drafted = 0  # tokens of each request in the last step
        self._longest = min(self.max_model_len, self.speculative_config.draft_model_config.max_model_len)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models over our attention backend, which replaces the platform's while they are built."""
        with tree_attention(self.vllm_config):
            super().load_model(*args, **kwargs)
        self._use_models(self.model)
        self._engines_forward = self.model.forward  # which `execute_model` calls within one long method
        self.model.forward = self._forward

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches as the engine does, and note where the target's are."""
        forget_caches(self.vllm_config)
        super().initialize_kv_cache(*args, **kwargs)
        for builder in self._builders():
            builder.pads = True
        self._use_caches()

    def finish_requests(self, scheduler_output: Any) -> None:
        """Forget the trees of requests that leave the batch as well; this is called in steps without tokens too."""
        gone = self._look_around(scheduler_output, self._blocks)
        self._with_grammar -= gone
        for name in gone:
            self._blocks.pop(name, None)
        if scheduler_output.scheduled_new_reqs:
            self._draws = None
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = Blocks([list(group) for group in new.block_ids])
            if new.sampling_params is not None and new.sampling_params.structured_outputs is not None:
                self._with_grammar.add(new.req_id)
        cached = scheduler_output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for group, blocks in zip(self._blocks[name].block_ids, more or (), strict=False):
                group += blocks
        super().finish_requests(scheduler_output)

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare as the engine does, as if drafts were chains."""
        self._scheduled = scheduler_output
        return super().prepare_inputs(scheduler_output, *args, **kwargs)

    def prepare_attn(self, input_batch: Any) -> Any:
        """Find the slots of the rows as the engine does, by positions without gaps; then the rows of trees get their
        tokens, and positions by depth."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        self._observe()
        state = self._state = self._prepared = self._read(input_batch)
        positions = input_batch.positions[: input_batch.num_tokens]
        in_chains = positions.clone() if self.model_config.uses_mrope else None
        state.batch.put_trees(input_batch.input_ids, input_batch.positions)
        self._moved = None if in_chains is None else positions - in_chains
        give_rows(self._builders(), state.batch.rows())
        return block_tables, slot_mappings[:, : input_batch.num_tokens]  # the rows of a graph may be more

    def _read(self, input_batch: Any) -> StepState:
        """Which requests of a vLLM ``InputBatch`` verify a tree."""
        names, lens = list(input_batch.req_ids), input_batch.num_scheduled_tokens.astype(np.int64)
        drafts = input_batch.num_draft_tokens_per_req
        counts = np.zeros_like(lens) if drafts is None else drafts.astype(np.int64)
        constrained = [i for i, name in enumerate(names) if name in self._with_grammar]
        prefix_lens = self.req_states.num_computed_tokens.gpu[input_batch.idx_mapping]
        computed = int(input_batch.num_computed_tokens_np.sum())
        # Of a prompt the host knows how much is read.
        read, prefill = input_batch.num_computed_prefill_tokens_np, input_batch.prefill_len_np
        in_prompts, in_text = read + lens - counts < prefill, bool((read >= prefill).all())
        of_step = counts, lens, prefix_lens, computed, in_prompts, constrained, in_text
        state = self._read_step(self._scheduled, names, *of_step)
        # With trees in the step before, the host does not know yet where the requests of this one are.
        has_trees = bool(len(state.batch.trees))
        self._logits_rows = counts + 1
        self._defers = self._can_defer and not (self.use_async_scheduling and (has_trees or self._had_trees))
        self._had_trees = has_trees
        return state

    def _set_active_loras(self, prompt_lora_mapping: Any, *args: Any, **kwargs: Any) -> None:
        """Say which adapter each row has, with drafts too: for their logits vLLM says it once per request."""
        if self._prepared is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, self._logits_rows).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target, by what was captured if the rows of a step are trees of one captured shape."""
        step, state, self._prepared = self._step, self._prepared, None
        if state is not None:  # else the engine warms up, or we measure
            state.layers = get_forward_context().attn_metadata
            give_rows(self._builders(), None)
            if self._moved is not None:  # all axes of a token of text move alike
                kwargs["positions"][:, : len(self._moved)] += self._moved
            if step is not None:
                step.begin(state.batch, state.layers, state.is_plain)
                # A multimodal target is given embeddings; those of trees are made again by what was captured.
                can_embed = kwargs.get("inputs_embeds") is None or self.supports_mm_inputs
                if can_embed and step.can_verify():
                    return step.verify()
        return self._engines_forward(*args, **kwargs)

    def _builders(self) -> list[Any]:
        return [group.get_metadata_builder() for groups in self.attn_groups for group in groups]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step as the engine does; a scheduler that is ahead hears of the shape that we would draft now."""
        output = super().sample_tokens(grammar_output)
        if not isinstance(output, AsyncOutput) or self._state is None:
            return output
        if self.use_async_scheduling:
            self._ended_before, self._ended = self._ended, (self._shapes, output)
            self._tell_shape(output.model_runner_output)
        else:
            self._shapes.observe(counts_of(output))
        return output

    def _observe(self) -> None:
        """Tell the policy what the step before the last accepted: the engine has its tokens, so nobody waits."""
        if self._ended_before is not None:
            shapes, output = self._ended_before
            shapes.observe_step_before(counts_of(output))
            self._ended_before = None

    @torch.inference_mode()
    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Verify every request's tree; a request without drafts has a tree of one node."""
        state, sampler = self._state, self.sampler
        self._sampled = state
        assert state is not None and sampler is not None
        batch = state.batch
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        nans = nans_of_requests(logits, batch) if sampler.compute_nans else None
        if grammar_output is not None:
            assert self.structured_outputs_worker is not None
            self.structured_outputs_worker.apply_grammar_bitmask(
                logits, input_batch, grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            )
        state.draws = self._draws_of(input_batch)
        plain, asked = token_by_token(sampler, input_batch), sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        is_changed, logprobs, step = bool(plain) or changes_at_nodes(sampler, input_batch), None, self._step
        if step is not None and not is_changed and asked is None and step.can_walk(state.is_greedy):
            accepted, tokens = step.walk(batch, logits, *state.draws)
        else:
            drafts, given = roots_only(batch.all_drafts(), plain), logits.float()
            if is_changed:
                rows = node_rows(batch.b, batch.width, batch.logits_rows, len(logits), self.device)
                given = processed(sampler, input_batch, drafts, rows, logits)
            if state.is_greedy and not len(batch.trees):
                accepted = self._verifier.ranks.agree(plainly(given.argmax(dim=-1)))
            else:
                accepted = self._verifier.accept(batch, drafts, given, state.draws, state.layers)
            tokens = accepted.tokens
            if asked is not None:
                path = batch.logits_row_of(accepted_rows(accepted, batch.width)).view(-1)
                logprobs = output_logprobs(sampler, asked, input_batch, logits[path], given[path], accepted)
        state.accepted = accepted
        sampled, rejected = get_num_sampled_and_rejected(
            accepted.lengths.clone(),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(tokens, logprobs, nans, sampled, rejected), sampled, rejected

    def _draws_of(self, input_batch: Any) -> tuple[SamplingParams, Tensor | None]:
        """`draws_of`, made anew where the batch is another one or a request is new."""
        slots = input_batch.idx_mapping_np.tobytes()
        if self._draws is None or self._draws[0] != slots:
            self._draws = slots, draws_of(self.sampler, input_batch)
        return self._draws[1]

    def draft(self, input_batch: Any, next_tokens: Tensor, parts: list[Tensor], plainly: bool = False) -> Tensor:
        """Draft the next trees of the batch; returns their tokens [b, W - 1].

        next_tokens [b]: the token after each request's last row; parts: the target's states of all query rows.
        plainly: the engine wants no drafts.
        """
        state, n = self._state, input_batch.num_tokens
        assert state is not None
        ids, positions = input_batch.input_ids[:n], input_batch.positions[:n]
        firsts, most = input_batch.num_computed_tokens_np.tolist(), None
        if int(input_batch.seq_lens_cpu_upper_bound.max()) + self.num_speculative_steps > self._longest:
            most = self._longest  # the head may have no positions for a tree; of the other requests it misses no token
        plainly = plainly or most is not None
        tokens = self._draft(state, next_tokens, ids, positions, [part[:n] for part in parts], firsts, plainly, most)
        self._drafted = tokens.shape[1]
        return tokens

    def keep_states(self, input_batch: Any, parts: list[Tensor], last: Tensor) -> None:
        """Take the states of a step for requests that want them stored; parts and last as of `StepFeatures.step`."""
        if self._features is not None and self._state is not None:
            self._features.step(self._state, input_batch.input_ids, input_batch.positions, parts, last)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the scheduler, with the links of the trees whose grammar it follows."""
        drafts, state = super().take_draft_token_ids(), self._sampled
        if drafts is None or state is None:
            return drafts
        if not self.use_async_scheduling:  # the engine gives as many as the flags have
            drafts = DraftTokenIds(drafts.req_ids, [tokens[: self._drafted] for tokens in drafts.draft_token_ids])
        return state.with_links(drafts)

    def query_rows(self) -> tuple[Tensor, Tensor]:
        """Tokens [most] int32 and positions [most] int64 of the target's query rows, at fixed addresses."""
        return self.input_buffers.input_ids, self.input_buffers.positions

    def rotary_rows(self) -> Tensor:
        """Positions of the target's query rows as its rotary embedding reads them, at a fixed address: [most] int64,
        or [axes, most] where rows of images have positions of several axes."""
        return self.model_state.rope_state.positions if self.model_config.uses_mrope else self.input_buffers.positions

    def embedding_rows(self, n: int) -> Tensor:
        """Embeddings [n, H] of the target's query rows, at a fixed address."""
        return self.model_state.dummy_inputs_embeds(n)

    def has_adapters(self) -> bool:
        """Whether a request of the step at hand has a LoRA adapter."""
        return self._state is not None and bool(self.lora_state.get_activate_loras(self._state.names))

    def _model_forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None) -> Any:
        """The target over rows that are no step: the costs of rounds and the self-test ask for it."""
        return self.model(
            input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=inputs_embeds
        )


def nans_of_requests(logits: Tensor, batch: RoundBatch) -> Tensor:
    """How many logits [n, V] of each request are no numbers, [b]."""
    rows = node_rows(batch.b, batch.width, batch.logits_rows, len(logits), logits.device)
    nans = get_num_nans(logits)
    return nans.new_zeros(batch.b).index_add_(0, rows.requests, nans)


def counts_of(output: AsyncOutput) -> list[int]:
    """The tokens that each request of a step got, once the host has them."""
    output.copy_event.synchronize()
    return output.num_sampled_tokens_np.tolist()
