"""vLLM's V1 model runner with draft trees: the engine prepares and runs the batch; verifying and drafting are ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from eagle_plugin.common.deploy_folder import Served
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import loader
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.draft_clock import DraftClock
from eagle_plugin.runtime.head_mailbox import HeadMailbox, open_mailbox
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.rng import without_sampled_children
from eagle_plugin.runtime.round import Drafts, without_spare_places
from eagle_plugin.runtime.startup import plugin_serves
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.backend import tree_attention
from eagle_plugin.vllm.batch import DraftStore, RoundBatch, root_drafts
from eagle_plugin.vllm.capture import captured_steps
from eagle_plugin.vllm.decode_step import DecodeStep, side_by_side
from eagle_plugin.vllm.deferred_extend import Key, PendingTokens, PlainRows, given_blocks
from eagle_plugin.vllm.drafter import DraftBatch, ExtendBatch, TreeProposer
from eagle_plugin.vllm.grammar import with_parents
from eagle_plugin.vllm.graph_modes import wants_graphs
from eagle_plugin.vllm.head_exchange import exchange_head
from eagle_plugin.vllm.linear_attention import LinearLayers
from eagle_plugin.vllm.policy_reports import PolicyReporter
from eagle_plugin.vllm.ranks import rank_logger
from eagle_plugin.vllm.sampling import KnownParams, draft_params, request_keys
from eagle_plugin.vllm.served import caps_of
from eagle_plugin.vllm.shapes import RoundShapes, choose_shapes, without_costs
from eagle_plugin.vllm.step_memory import Root
from eagle_plugin.vllm.synthetic import synthetic_rates
from eagle_plugin.vllm.target_weights import use_bf16_kernel
from eagle_plugin.vllm.verifier import TreeVerifier


class TreeModelRunner(GPUModelRunner):
    """One step: put the trees into the batch, run the target, verify, draft the next trees.

    The runner of a GPU; `cpu_worker.TreeCPUModelRunner` is that of a CPU.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.wants_graphs = wants_graphs(vllm_config)
        self._caps: Shape = caps_of(self.speculative_config)
        self._tp_group = get_tp_group()
        self._logger = rank_logger(logging.getLogger("vllm.eagle_plugin"))
        # Scheduled ahead, a step has as many rows as the caps, whatever is drafted: nothing to choose.
        self._policy_mode = "fixed" if self.use_async_scheduling else policy_mode()
        self._shapes = RoundShapes(without_costs(self._caps, self._policy_mode))
        self._reporter: PolicyReporter | None = None
        if self._tp_group.rank_in_group == 0:
            self._reporter = PolicyReporter(self.speculative_config, lambda: self._shapes.chooser)
        self.drafter: TreeProposer = TreeProposer(vllm_config, device, self)
        self._draft_params = KnownParams()
        self._draft_clock = DraftClock(self.device.type, self._logger)
        self._store = DraftStore()
        self._has_reasoner = bool(vllm_config.structured_outputs_config.reasoning_parser)
        self._parents: tuple[list[str], Tensor] | None = None  # of drafted nodes, of the requests with a grammar
        self._has_drafted = False  # in the present step
        self._pending: PendingTokens  # with the caches
        self._mailbox: HeadMailbox | None = None
        self._batch: RoundBatch | None = None
        self._accepted: Accepted | None = None
        self._metadata: dict[str, Any] = {}  # by layer
        self._verifier: TreeVerifier
        self._step: DecodeStep | None = None  # what was captured
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
        kernels = loader.backend(self.device.type)
        self._logger.info(plugin_serves(self.speculative_config.method, self._caps, kernels))

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches as the engine does, and note where the target's are."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        # One state per request, not one per drafted token; the engine may have made the batch anew until now.
        self.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
            self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, PIN_MEMORY
        )
        context = self.compilation_config.static_forward_context
        groups = []
        for group in self.kv_cache_config.kv_cache_groups:
            others = self.drafter._draft_attn_layer_names | self.linear.names
            names = [name for name in group.layer_names if name not in others]
            found = [context[name].kv_cache for name in names if isinstance(context[name], AttentionLayerBase)]
            # Layers can share a cache, whose keys are moved once.
            if caches := {cache.data_ptr(): cache for cache in found}:
                groups.append(CacheGroup.of(names[0], list(caches.values())))
        ranks = RankAgreement(self._tp_group, self.max_num_reqs, self._caps.max_accept_length, self.device)
        mode, synthetic = self.model_config.logprobs_mode, synthetic_rates(self.speculative_config)
        self._verifier = TreeVerifier(groups, self.linear, self.sampler, mode, ranks, synthetic)
        caches, head_layer = self.kv_cache_config.kv_cache_groups, next(iter(self.drafter._draft_attn_layer_names))
        self._head_group = next(i for i, group in enumerate(caches) if head_layer in group.layer_names)
        self._pending = PendingTokens(caches[self._head_group].kv_cache_spec.block_size)

    def open_mailbox(self) -> None:
        """Look for requests to exchange the head from now on, if ``EAGLE_DEPLOY`` names a folder for them."""
        speculative, parallel = self.vllm_config.speculative_config, self.vllm_config.parallel_config
        target = self.vllm_config.model_config.model
        served = Served("vllm", target, speculative.model, speculative.method.upper())
        ranks = parallel.world_size_across_dp
        exchange = partial(exchange_head, self)
        self._mailbox = open_mailbox(served, exchange, self._logger, rank=parallel.rank, ranks=ranks)

    @torch.inference_mode()
    def capture_steps(self) -> None:
        """Capture the functions of decode steps, where the device has graphs; the caches must be there."""
        self._step = None  # frees the graphs that were there
        self._step = captured_steps(self, self._logger)

    def choose_by_costs(self) -> None:
        """Let the policy choose the shapes from now on, if it is asked for; the caches must be there, unused."""
        self._shapes = RoundShapes(choose_shapes(self, self._caps, self._policy_mode, self._logger))

    def _update_states(self, scheduler_output: Any) -> Any:
        """Forget the trees of requests that leave the batch as well; this is called in steps without tokens too."""
        if self._reporter is not None:
            self._reporter.step(has_tokens=scheduler_output.total_num_scheduled_tokens > 0)
        if self._mailbox is not None:
            self._mailbox.look()
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        self._store.forget(gone)
        if self.cache_config.enable_prefix_caching and len(self._pending):
            self._pending.leave(gone)
            found, new = given_blocks(scheduler_output, self._head_group, self._pending.block_size)
            self._pending.forget(new)
            self._read_pending(self._pending.of_blocks(found))
            if gone:  # who found these blocks in the step that filled them needs them read as well
                tables = (
                    state.block_ids[self._head_group] for name, state in self.requests.items() if name not in gone
                )
                held = {block for table in tables for block in table}
                self._read_pending([key for key in self._pending.of_blocks(held) if not isinstance(key, str)])
        self._pending.forget(gone)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        """Prepare as the engine does, then put the tree's tokens and positions into their rows."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        counts = np.array(prepared[1].num_draft_tokens, dtype=np.int64)
        prefix_lens = self.num_computed_tokens[: len(counts)]
        if self.use_async_scheduling:
            self._drop_unmasked(scheduler_output)
        batch = RoundBatch.read(counts, num_scheduled_tokens, self.input_batch.req_ids, prefix_lens, self._store)
        self._store.keep_own()
        committed = (num_scheduled_tokens - counts).sum()
        keys = self.input_batch.num_computed_tokens_cpu[: batch.b].sum() + committed
        self._shapes.scheduled(batch, int(keys), int(committed) - batch.b)
        batch.put_trees(self.input_ids.gpu, self.positions)
        self._batch = batch
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Give the builders the rows of this step."""
        rows = None if self._batch is None else self._batch.rows()
        builders = [group.get_metadata_builder() for groups in self.attn_groups for group in groups]
        for builder in builders:
            builder.rows = rows
        try:
            built = super()._build_attention_metadata(*args, **kwargs)
        finally:
            for builder in builders:
                builder.rows = None
        self._metadata = built[0]
        if self._step is not None and self._batch is not None:
            self._step.begin(self._batch, self._metadata)
        return built

    def _model_forward(
        self,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the target by what was captured, if the rows of this step are trees of the caps."""
        step, batch = self._step, self._batch
        is_served = get_forward_context().attn_metadata is self._metadata  # else the engine warms up, or we measure
        if step is not None and batch is not None and is_served and inputs_embeds is None and step.can_verify(batch):
            return step.verify()
        return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)

    def _sample(self, logits: Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Verify every request's tree; a request without drafts has a tree of one node."""
        assert self._batch is not None
        self._has_drafted, self._parents = False, None
        self.input_batch.update_async_output_token_ids()
        metadata = self.input_batch.sampling_metadata
        states = [self.requests[name] for name in self.input_batch.req_ids]
        output, self._accepted = self._verifier.verify(
            self._batch, logits, metadata, states, self._metadata, self._step
        )
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Update the batch as the engine does, but without generators: it rewinds them; here they only hold seeds."""
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            kept = super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators
        if not self.use_async_scheduling:  # else the tokens are not on the host yet
            self._shapes.observe(kept[3])
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
        batch, accepted = self._batch, self._accepted
        assert batch is not None and accepted is not None
        self._has_drafted = True
        next_tokens, counts = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        self._copy_valid_sampled_token_count(next_tokens, counts)
        greedy = sampling_metadata.all_greedy
        in_prompts = self.discard_request_mask.np[: batch.b]  # requests that sample nothing yet
        shape = PLAIN if in_prompts.all() else self._shapes.choose(batch, self._pending.rows_of_requests)
        n = scheduler_output.total_num_scheduled_tokens
        ids, positions = self.input_ids.gpu[:n], self.positions[:n]
        parts = [part[:n] for part in aux_hidden_states or [hidden_states]]
        slot_table = self._metadata[next(iter(self.drafter._draft_attn_layer_names))].slot_table
        if shape == PLAIN and not len(batch.trees):
            self._shapes.begin(shape, batch)
            rows = PlainRows.after(batch, next_tokens, ids, side_by_side(parts))
            firsts = self.input_batch.num_computed_tokens_cpu[: batch.b].tolist()
            self._pending.add(self.input_batch.req_ids, firsts, batch.host_lens, rows, slot_table)
            self._read_pending(self._pending.excess())
            return self._keep(batch, root_drafts(batch.b, self.device))
        self._read_pending(self.input_batch.req_ids)
        step = self._step
        if step is not None and step.can_extend(batch, accepted, shape, greedy):
            root = self._draft_clock.time_reading(shape, partial(step.extend, accepted, parts, greedy))
        else:
            extend = ExtendBatch.after(batch, without_spare_places(accepted), next_tokens, ids, positions)
            if shape == PLAIN:
                self.drafter.read_pending(extend.pending(side_by_side(parts), slot_table))
                self._shapes.begin(shape, batch)
                return self._keep(batch, root_drafts(batch.b, self.device))
            read = partial(self.drafter.extend, extend, side_by_side(parts), slot_table, shape, greedy)
            state = self._draft_clock.time_reading(shape, read)
            root = Root(state, extend.lengths, next_tokens.long())
        self._shapes.begin(shape, batch)
        chains = self._chains()
        params = self._draft_params.of(
            sampling_metadata,
            lambda: draft_params(sampling_metadata, batch.b, self.input_batch.vocab_size, self.device),
        )
        if chains is not None:  # a chain is made of first children; sampled ones come after them
            params = without_sampled_children(params, chains)
        keys = None if greedy else request_keys(sampling_metadata.generators, batch.b, self.device)
        trees = DraftBatch(shape, root.lengths, slot_table, params, keys, chains)
        drafter = step if step is not None and step.can_draft(trees, root.state) else self.drafter
        drafts = self._draft_clock.time(shape, partial(drafter.draft_tree, trees, root.tokens, root.state))
        return self._keep(batch, drafts)

    def _keep(self, batch: RoundBatch, drafts: Drafts) -> Tensor:
        """Keep drafts until the step that verifies them; returns their tokens [b, W - 1]."""
        whole = not self.discard_request_mask.np[: batch.b].any()
        step = self._step if self._step is not None and self._step.holds(drafts) else None
        is_borrowed, is_greedy = step is not None, drafts.proposals.tokens.shape[1] == 0
        sum_up = PathSums.__call__ if step is None else partial(step.path_sums, is_greedy)
        self._shapes.launched(batch, drafts, whole, sum_up)
        self._store.put(self.input_batch.req_ids, drafts, is_borrowed)
        self._parents = None
        if not self._has_reasoner and (asked := self._with_grammar()):
            (places,) = to_device([np.array(asked)], self.device)
            self._parents = [self.input_batch.req_ids[i] for i in asked], drafts.tree.parents[places, 1:]
        tokens = drafts.tree.tokens[:, 1:]
        return tokens.clone() if is_borrowed else tokens  # the engine may copy them to the host later

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the scheduler, with the links of the trees whose grammar it follows."""
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        if not (self._has_drafted or self.use_async_scheduling):
            # A request is as long as the head serves, so that vLLM asked for no drafts and gives zeros in their place.
            return DraftTokenIds(drafts.req_ids, [[] for _ in drafts.req_ids])
        if self._parents is None:
            return drafts
        names, parents = self._parents
        return with_parents(drafts, dict(zip(names, parents.tolist(), strict=True)))

    def _read_pending(self, keys: Iterable[Key]) -> None:
        """Let the head read what it has not read of these requests or blocks."""
        for pending in self._pending.take(keys, self.max_num_tokens):
            self.drafter.read_pending(pending)

    def _drop_unmasked(self, scheduler_output: Any) -> None:
        """Drop the trees for which the scheduler, ahead of us, made no masks: those of requests with a grammar that
        missed a step."""
        masked = self._store.newest if scheduler_output.pending_structured_output_tokens else frozenset()
        names = [self.input_batch.req_ids[i] for i in self._with_grammar()]
        self._store.forget([name for name in names if name not in masked])

    def _with_grammar(self) -> list[int]:
        """Places of the requests that have a grammar."""
        states = (self.requests[name] for name in self.input_batch.req_ids)
        return [i for i, state in enumerate(states) if state.sampling_params.structured_outputs is not None]

    def _chains(self) -> Tensor | None:
        """Requests that get a chain [b] bool: those whose grammar begins where their reasoning ends, which the
        scheduler looks for along one path; None without any."""
        if not self._has_reasoner or not (asked := self._with_grammar()):
            return None
        chains = np.zeros(len(self.input_batch.req_ids))
        chains[asked] = 1
        return to_device([chains], self.device)[0] > 0
