"""Serves vLLM's steps with draft trees: the engine prepares and runs the batch; verifying and drafting are ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.kernels import loader
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.draft_clock import DraftClock
from eagle_plugin.runtime.head_mailbox import HeadMailbox
from eagle_plugin.runtime.round import Drafts, without_spare_places
from eagle_plugin.runtime.startup import plugin_serves
from eagle_plugin.vllm.backend import tree_attention
from eagle_plugin.vllm.batch import DraftStore, RoundBatch, root_drafts
from eagle_plugin.vllm.decode_step import side_by_side
from eagle_plugin.vllm.deferred_extend import DeferredTokens, Owner, PlainRows
from eagle_plugin.vllm.draft_limits import draft_limits
from eagle_plugin.vllm.drafter import DraftBatch, ExtendBatch, TreeProposer
from eagle_plugin.vllm.graph_modes import wants_graphs
from eagle_plugin.vllm.head_exchange import mailbox_of
from eagle_plugin.vllm.linear_attention import LinearLayers
from eagle_plugin.vllm.plugin_config import caps_of
from eagle_plugin.vllm.policy_reports import PolicyReporter
from eagle_plugin.vllm.ranks import rank_logger
from eagle_plugin.vllm.sampling import RequestDraws
from eagle_plugin.vllm.scheduled_shapes import padded, scheduled_drafts, tell_shape
from eagle_plugin.vllm.shapes import RoundShapes, choose_shapes, without_costs
from eagle_plugin.vllm.step_memory import Root
from eagle_plugin.vllm.step_state import StepState, has_grammar
from eagle_plugin.vllm.target_runner import TargetRunner
from eagle_plugin.vllm.target_weights import use_bf16_kernel
from eagle_plugin.vllm.verifier import TreeVerifier, verifier_of


class TreeModelRunner(TargetRunner):
    """One step: put the trees into the batch, run the target, verify, draft the next trees.

    The runner of a GPU; `cpu_worker.TreeCPUModelRunner` is that of a CPU.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.wants_graphs = wants_graphs(vllm_config)
        self._caps: Shape = caps_of(self.speculative_config)
        self._logger = rank_logger(logging.getLogger("vllm.eagle_plugin"))
        self._policy_mode = policy_mode()
        self._wanted: Shape | None = None  # what would be drafted now
        self._limits = draft_limits(vllm_config)
        self._shapes = RoundShapes(without_costs(self._caps, self._policy_mode), self._limits)
        self._reporter: PolicyReporter | None = None
        if get_tp_group().rank_in_group == 0:
            self._reporter = PolicyReporter(self.speculative_config, lambda: self._shapes.chooser)
        self.drafter: TreeProposer = TreeProposer(vllm_config, device, self)
        self._draws = RequestDraws(self.input_batch.vocab_size, device, self.model_config.seed)
        self._draft_clock = DraftClock(self.device.type, self._logger)
        self._store = DraftStore()
        self._has_reasoner = bool(vllm_config.structured_outputs_config.reasoning_parser)
        self._deferred: DeferredTokens  # with the caches
        self._mailbox: HeadMailbox | None = None
        self._sampled: StepState | None = None  # of the step that was sampled last
        self._verifier: TreeVerifier
        # With drafts vLLM itself leaves min_p and logit_bias out.
        self.input_batch.logitsprocs = LogitsProcessors(
            processor(vllm_config, device, PIN_MEMORY) for processor in BUILTIN_LOGITS_PROCESSORS
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models over our attention backend, which replaces the platform's while they are built."""
        with tree_attention(self.vllm_config):
            super().load_model(*args, **kwargs)
        use_bf16_kernel(self.get_model(), self.model_config)
        self.linear = LinearLayers(self.get_model())
        self._logger.info(plugin_serves(self.speculative_config.method, self._caps, loader.backend(self.device.type)))

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches as the engine does, and note where the target's are."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        # One state per request, not one per drafted token; the engine may have made the batch anew until now.
        self.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
            self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, PIN_MEMORY
        )
        self._verifier = verifier_of(self)
        groups = self.kv_cache_config.kv_cache_groups
        self._deferred = DeferredTokens.of_layers(groups, self.drafter._draft_attn_layer_names)

    def open_mailbox(self) -> None:
        """Look for requests to exchange the head from now on, if ``EAGLE_DEPLOY`` names a folder for them."""
        self._mailbox = mailbox_of(self, self._logger)

    def choose_by_costs(self) -> None:
        """Let the policy choose the shapes from now on, if it is asked for; the caches must be there, unused."""
        chooser = choose_shapes(self, self._caps, self._policy_mode, self._logger)
        self._shapes = RoundShapes(chooser, self._limits)

    def _update_states(self, scheduler_output: Any) -> Any:
        """Forget the trees of requests that leave the batch as well; this is called in steps without tokens too."""
        if self._reporter is not None:
            self._reporter.step(has_tokens=scheduler_output.total_num_scheduled_tokens > 0)
        if self._mailbox is not None:
            self._mailbox.look()
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        self._store.forget(gone)
        self._draws.forget(scheduler_output.finished_req_ids)
        if self.cache_config.enable_prefix_caching and len(self._deferred):
            self._read_deferred(self._deferred.wanted_by_blocks(scheduler_output, gone, self.requests))
        self._deferred.forget(gone)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        """Prepare as the engine does, then put the tree's tokens and positions into their rows."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        counts = np.array(prepared[1].num_draft_tokens, dtype=np.int64)
        prefix_lens = self.num_computed_tokens[: len(counts)]
        names = self.input_batch.req_ids
        constrained = [i for i, name in enumerate(names) if has_grammar(self.requests[name])]
        placeholders, shape = 0, None
        if self.use_async_scheduling:
            masked = scheduler_output.pending_structured_output_tokens
            self._store.forget_unmasked([names[i] for i in constrained], masked)
            placeholders, shape = scheduled_drafts(scheduler_output, self._caps)
        batch = RoundBatch.read(counts, num_scheduled_tokens, names, prefix_lens, self._store)
        self._store.keep_own()
        committed = (num_scheduled_tokens - counts).sum()
        prefix_tokens = self.input_batch.num_computed_tokens_cpu[: batch.b].sum() + committed
        self._shapes.scheduled(batch, int(prefix_tokens), int(committed) - batch.b)
        batch.put_trees(self.input_ids.gpu, self.positions)
        self._state = StepState(batch, constrained, placeholders, shape)
        return prepared

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
        requests = [self.requests[name] for name in self.input_batch.req_ids]
        output, state.accepted = self._verifier.verify(
            state.batch,
            logits,
            metadata,
            self._draws.of(metadata, self.input_batch.req_ids),
            requests,
            state.layers,
            self._step,
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
            self._shapes.observe([int(not one) for one in self._in_prompts(self._state)])
        return kept

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
        assert state is not None and state.accepted is not None
        batch, accepted, state.has_drafted = state.batch, state.accepted, True
        next_tokens, counts = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        self._copy_valid_sampled_token_count(next_tokens, counts)
        greedy = sampling_metadata.all_greedy
        shape = self._choose(state)
        n = scheduler_output.total_num_scheduled_tokens
        ids, positions = self.input_ids.gpu[:n], self.positions[:n]
        parts = [part[:n] for part in aux_hidden_states or [hidden_states]]
        slot_table = state.layers[next(iter(self.drafter._draft_attn_layer_names))].slot_table
        if shape == PLAIN and not len(batch.trees):
            self._shapes.begin(shape, batch)
            rows = PlainRows.after(batch, next_tokens, ids, side_by_side(parts))
            firsts = self.input_batch.num_computed_tokens_cpu[: batch.b].tolist()
            self._deferred.add(self.input_batch.req_ids, firsts, batch.host_lens, rows, slot_table)
            self._read_deferred(self._deferred.excess())
            return self._keep(state, root_drafts(batch.b, self.device))
        self._read_deferred(self.input_batch.req_ids)
        step = self._step
        if step is not None and step.can_extend(accepted, shape, greedy):
            root = self._draft_clock.time_reading(shape, partial(step.extend, accepted, parts, greedy))
        else:
            extend = ExtendBatch.after(batch, without_spare_places(accepted), next_tokens, ids, positions)
            if shape == PLAIN:
                self.drafter.read_deferred(extend.deferred(side_by_side(parts), slot_table))
                self._shapes.begin(shape, batch)
                return self._keep(state, root_drafts(batch.b, self.device))
            widest = shape if step is None else self._caps  # as captured drafts of any shape read them
            read = partial(self.drafter.extend, extend, side_by_side(parts), slot_table, widest, greedy)
            root = Root(self._draft_clock.time_reading(shape, read), extend.lengths, next_tokens.long())
        self._shapes.begin(shape, batch)
        # A grammar begins where the reasoning ends, which the scheduler looks for along one path.
        chains = state.chains() if self._has_reasoner else None
        draws = self._draws.of(sampling_metadata, self.input_batch.req_ids)
        trees = DraftBatch(shape, root.lengths, slot_table, *draws, chains)
        drafter = step if step is not None and step.can_draft(trees, root.state) else self.drafter
        drafts = self._draft_clock.time(shape, partial(drafter.draft_tree, trees, root.tokens, root.state))
        return self._keep(state, drafts)

    def _choose(self, state: StepState) -> Shape:
        """The shape of the drafts of this step; where the scheduler is ahead it chose among earlier wishes of ours."""
        if self._in_prompts(state).all():
            return PLAIN
        self._wanted = self._shapes.choose(state.batch, self._deferred.rows_of_requests)
        return state.shape or self._wanted

    def _in_prompts(self, state: StepState) -> np.ndarray:
        """The requests [b] bool that sample nothing yet: a part of their prompt is left."""
        return self.discard_request_mask.np[: state.batch.b]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step as the engine does; a scheduler that is ahead hears of the shape that we would draft now."""
        output = super().sample_tokens(grammar_output)
        if self._wanted is not None and isinstance(output, AsyncGPUModelRunnerOutput):
            tell_shape(output, self._wanted)
        return output

    def _keep(self, state: StepState, drafts: Drafts) -> Tensor:
        """Keep drafts until the step that verifies them; returns their tokens [b, W - 1]."""
        whole = not self._in_prompts(state).any()
        step = self._step if self._step is not None and self._step.holds(drafts) else None
        is_borrowed, is_greedy = step is not None, self.input_batch.sampling_metadata.all_greedy
        sum_up = PathSums.__call__ if step is None else partial(step.path_sums, drafts.shape, is_greedy)
        self._shapes.launched(state.batch, drafts, whole, sum_up)
        self._store.put(self.input_batch.req_ids, drafts, is_borrowed)
        if not self._has_reasoner:
            state.keep_parents(self.input_batch.req_ids, drafts)
        tokens = padded(drafts.tree.tokens[:, 1:], state.placeholders)
        return tokens.clone() if is_borrowed else tokens  # the engine may copy them to the host later

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the scheduler, with the links of the trees whose grammar it follows."""
        drafts, state = super().take_draft_token_ids(), self._sampled
        if drafts is None or state is None:
            return drafts
        if not (state.has_drafted or self.use_async_scheduling):
            # A request is as long as the head serves, so that vLLM asked for no drafts and gives zeros in their place.
            return DraftTokenIds(drafts.req_ids, [[] for _ in drafts.req_ids])
        return state.with_links(drafts)

    def _read_deferred(self, owners: Iterable[Owner]) -> None:
        """Let the head read what it has not read of these requests or blocks."""
        for rows in self._deferred.take(owners, self.max_num_tokens):
            self.drafter.read_deferred(rows)
