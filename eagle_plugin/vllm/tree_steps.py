"""What vLLM's two model runners have in common where they serve draft trees: who chooses the shapes, and how the next
trees are drafted after a step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from eagle_plugin.collect.settings import CollectError
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.kernels import loader
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.accept import without_spare_places
from eagle_plugin.runtime.draft_clock import DraftClock
from eagle_plugin.runtime.head_mailbox import HeadMailbox
from eagle_plugin.runtime.request_limits import Limits
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.runtime.startup import StartRefused, plugin_serves
from eagle_plugin.vllm.batch import DraftStore, RoundBatch, root_drafts
from eagle_plugin.vllm.block_support import method_of
from eagle_plugin.vllm.capture import captured_steps
from eagle_plugin.vllm.decode_step import DecodeStep, side_by_side
from eagle_plugin.vllm.deferred_extend import DeferredTokens, Owner, PlainRows
from eagle_plugin.vllm.draft_limits import draft_limits
from eagle_plugin.vllm.features import StepFeatures, step_features
from eagle_plugin.vllm.graph_modes import wants_graphs
from eagle_plugin.vllm.head_exchange import mailbox_of
from eagle_plugin.vllm.head_forwards import DraftBatch, ExtendBatch, HeadForwards
from eagle_plugin.vllm.linear_attention import LinearLayers
from eagle_plugin.vllm.lookup_rows import LookupRows, lookup_rows_of
from eagle_plugin.vllm.plugin_config import caps_of
from eagle_plugin.vllm.policy_reports import PolicyReporter
from eagle_plugin.vllm.ranks import rank_logger
from eagle_plugin.vllm.request_fields import AskedSources
from eagle_plugin.vllm.scheduled_shapes import padded, scheduled_drafts, tell_shape
from eagle_plugin.vllm.shapes import RoundShapes, choose_shapes, without_costs
from eagle_plugin.vllm.step_memory import Root
from eagle_plugin.vllm.step_state import StepState
from eagle_plugin.vllm.target_weights import use_bf16_kernel
from eagle_plugin.vllm.verifier import TreeVerifier, verifier_of


class TreeSteps:
    """A mixin of model runners; `drafter` is a head that one of vLLM's classes has loaded."""

    vllm_config: Any
    speculative_config: Any
    model_config: Any
    device: torch.device
    max_num_tokens: int
    kv_cache_config: Any
    cache_config: Any
    use_async_scheduling: bool
    drafter: HeadForwards
    linear: LinearLayers

    needed_bytes = 0  # of device memory beside what is allocated at the start, for the largest step; 0: nobody knows
    _state: StepState | None = None  # of the step that was prepared last
    _step: DecodeStep | None = None  # what was captured
    _wanted: Shape | None = None  # what would be drafted now
    _reporter: PolicyReporter | None = None
    _mailbox: HeadMailbox | None = None
    _features: StepFeatures | None = None  # where states are stored
    _lookup_rows: LookupRows | None = None  # where branches are looked up
    _requests: Mapping[str, Any] | None = None  # as of `_look_around`; None without prefix caching
    _can_defer = True  # whether the head may ever read the tokens of a plain step later
    _defers = True  # whether it may those of this step
    _verifier: TreeVerifier  # with the caches
    _deferred: DeferredTokens  # the same

    def _begin(self, vllm_config: Any) -> None:
        """Make what steps need before the models are loaded; a runner's constructor calls this."""
        self.wants_graphs = wants_graphs(vllm_config)
        self._caps: Shape = caps_of(self.speculative_config)
        self._logger = rank_logger(logging.getLogger("vllm.eagle_plugin"))
        self._policy_mode = policy_mode()
        self._limits = draft_limits(vllm_config)
        self._shapes = RoundShapes(without_costs(self._caps, self._policy_mode), self._limits)
        self._draft_clock = DraftClock(self.device.type, self._logger)
        self._store = DraftStore()
        # With a connector, what the head reads of a step goes to others with its blocks.
        self._defers = self._can_defer = vllm_config.kv_transfer_config is None
        self._has_reasoner = bool(vllm_config.structured_outputs_config.reasoning_parser)
        self._asked = AskedSources(self.device, self._has_reasoner)

    def _use_models(self, model: Any) -> None:
        """Take over the target and the head, which are loaded."""
        use_bf16_kernel(model, self.model_config)
        self.linear = LinearLayers(model)
        self._lookup_rows = lookup_rows_of(self.vllm_config, self._caps, self.device, self._logger)
        self.drafter.lookups = None if self._lookup_rows is None else self._lookup_rows.lookups
        method = method_of(self.speculative_config)
        self._logger.info(plugin_serves(method, self._caps, loader.backend(self.device.type)))

    def _use_caches(self) -> None:
        """Note where the target's caches and the head's are, which are allocated."""
        groups = self.kv_cache_config.kv_cache_groups
        self.drafter.check_cache_groups(groups)
        self._verifier = verifier_of(self)
        self._deferred = DeferredTokens.of_layers(groups, self.drafter._draft_attn_layer_names)
        self._defers = self._can_defer = self._can_defer and self._deferred.can_wait

    @torch.inference_mode()
    def capture_steps(self) -> None:
        """Capture the functions of decode steps, where the device has graphs; the caches must be there."""
        self._step = None  # frees the graphs that were there
        self._step = captured_steps(self, self._logger)
        if self._shapes.chooser.policy is not None:
            self._shapes.chooser.policy.costs.forget_padding()

    def padded_b(self, b: int, shape: Shape) -> int:
        """As `DecodeStep.padded_b` of what is captured now, which another head replaces."""
        return b if self._step is None else self._step.padded_b(b, shape)

    def open_mailbox(self) -> None:
        """Look for requests to exchange the head from now on, if ``EAGLE_DEPLOY`` names a folder for them."""
        self._mailbox = mailbox_of(self, self._logger)

    def open_features(self) -> None:
        """Store the states of requests that ask for it from now on, if ``EAGLE_FEATURES`` names a store.

        Raises:
            StartRefused: they cannot be stored there.
        """
        try:
            self._features = step_features(self)
        except CollectError as error:
            raise StartRefused(error) from None

    def choose_by_costs(self) -> None:
        """Let the policy choose the shapes from now on, if it is asked for; the caches must be there, unused."""
        if self._reporter is None and get_tp_group().rank_in_group == 0:  # of served rounds alone
            engine = self.vllm_config.parallel_config.data_parallel_index
            self._reporter = PolicyReporter(self.speculative_config, lambda: self._shapes.chooser, engine=engine)
        chooser = choose_shapes(self, self._caps, self._policy_mode, self._logger)
        self._shapes = RoundShapes(chooser, self._limits, self._captured)
        if self.drafter.lookups is not None:
            chooser.looked_up = self.drafter.lookups.counts
            self.drafter.lookups.clear()  # what tests and measurements left

    def _captured(self, b: int) -> Collection[Shape] | None:
        """As `CapturedRounds.allowed`."""
        return None if self._step is None else self._step.allowed(b)

    def _tell_shape(self, output: Any) -> None:
        """Let the output of a step [vLLM's ``ModelRunnerOutput``] tell the scheduler what we would draft now."""
        if self._wanted is not None:
            tell_shape(output, self._wanted, () if self._step is None else self._step.narrower(self._wanted))

    def _look_around(self, scheduler_output: Any, requests: Mapping[str, Any]) -> set[str]:
        """Before a step: report, exchange the head if asked to, forget the trees of requests that leave the batch, and
        let the head read what others will find in the prefix cache.

        requests: what has the `block_ids` of each, always the same mapping. Returns those that leave.
        """
        if self._reporter is not None:
            self._reporter.step(has_tokens=scheduler_output.total_num_scheduled_tokens > 0)
        if self._mailbox is not None:
            self._mailbox.look()
        gone: set[str] = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        self._store.forget(gone)
        if self._lookup_rows is not None:
            self._lookup_rows.forget(scheduler_output.finished_req_ids)
            self._lookup_rows.begin(scheduler_output.scheduled_new_reqs)
        self._asked.forget(scheduler_output.finished_req_ids)
        if self._features is not None:
            self._features.finish(scheduler_output.finished_req_ids)
            self._features.begin(scheduler_output.scheduled_new_reqs)
        self._asked.begin(scheduler_output.scheduled_new_reqs, self._is_looked_up)
        if self.cache_config.enable_prefix_caching and self._can_defer:
            self._requests = requests
            self._read_deferred(self._deferred.wanted_by_blocks(scheduler_output, gone))
        self._deferred.forget(gone)
        return gone

    def _read_step(
        self,
        scheduler_output: Any,
        names: list[str],
        counts: np.ndarray,
        lens: np.ndarray,
        prefix_lens: Tensor,
        computed: int,
        in_prompts: np.ndarray,
        with_grammar: list[int],
        in_text: bool,
    ) -> StepState:
        """Which requests of a step verify a tree.

        counts, lens and prefix_lens as of `RoundBatch.read`; computed: tokens of all requests before the step;
        in_prompts, with_grammar and in_text as of `StepState`.
        """
        placeholders, shape = 0, None
        if self.use_async_scheduling:
            masked = scheduler_output.pending_structured_output_tokens
            self._store.forget_unmasked([names[i] for i in with_grammar], masked)
            placeholders, shape = scheduled_drafts(scheduler_output, self._caps)
        batch = RoundBatch.read(counts, lens, names, prefix_lens, self._store)
        self._store.keep_own()
        committed = int((lens - counts).sum())
        limits = self._asked.limits(names)
        drafting = None if limits is None else limits.drafting
        self._shapes.scheduled(batch, computed + committed, committed - batch.b, drafting)
        return StepState(batch, names, in_prompts, with_grammar, counts > 0, in_text, placeholders, shape)

    def _draft(
        self,
        state: StepState,
        next_tokens: Tensor,
        ids: Tensor,
        positions: Tensor,
        parts: list[Tensor],
        firsts: Sequence[int],
        plainly: bool = False,
        most_positions: int | None = None,
    ) -> Tensor:
        """Draft the next trees of the batch; returns their tokens [b, W - 1], whose links are kept here.

        next_tokens [b]: the token after each request's last row; ids, positions [N] and parts, each [N, ...], are the
        target's, of its query rows. firsts: each request's first position, a number of the host, right with `_defers`.
        plainly: draft nothing, whatever the policy says. most_positions: as many as the head has, where a request of
        the batch may be longer; such a batch is plain, and read at once.
        """
        assert state.accepted is not None and state.draws is not None
        batch, accepted = state.batch, state.accepted
        limits = self._asked.limits(state.names, state.in_prompts)
        # Chosen whatever is drafted: a scheduler that is ahead hears of it, and may ask for nothing because of it.
        is_greedy, shape = state.is_greedy, self._choose(state, limits)
        if plainly:
            shape = PLAIN
        if most_positions is not None:
            self._wanted = PLAIN  # until the long request has ended
        rows = None
        if self._lookup_rows is not None:
            rows = self._lookup_rows.of(state.names, state.in_prompts)
            self._lookup_rows.lookups.append(rows, batch.roots, accepted)
        slot_table = state.layers[next(iter(self.drafter._draft_attn_layer_names))].slot_table
        can_wait = self._defers and most_positions is None and self._deferred.can_keep(parts)
        if shape == PLAIN and not len(batch.trees) and can_wait:
            self._shapes.begin(shape, batch)
            plain = PlainRows.after(batch, next_tokens, ids, side_by_side(parts))
            self._read_deferred(self._deferred.excess(plain))
            self._deferred.add(state.names, firsts, batch.host_lens, plain, slot_table, self._requests)
            return self._keep(state, root_drafts(batch.b, self.device))
        self._catch_up(state.names)
        step = self._step
        if step is not None and step.can_extend(accepted, shape, is_greedy):
            root = self._draft_clock.time_reading(shape, partial(step.extend, accepted, parts, is_greedy))
        else:
            extend = ExtendBatch.after(batch, without_spare_places(accepted), next_tokens, ids, positions)
            if shape == PLAIN:
                if most_positions is not None:
                    extend = extend._replace(positions=extend.positions.clamp(max=most_positions - 1))
                self.drafter.read_deferred(extend.deferred(side_by_side(parts), slot_table))
                self._shapes.begin(shape, batch)
                return self._keep(state, root_drafts(batch.b, self.device))
            widest = shape if step is None else self._caps  # as captured drafts of any shape read them
            read = partial(self.drafter.extend, extend, side_by_side(parts), slot_table, widest, is_greedy)
            root = Root(self._draft_clock.time_reading(shape, read), extend.lengths, next_tokens.long())
        self._shapes.begin(shape, batch)
        # A grammar begins where the reasoning ends, which the scheduler looks for along one path.
        chains = state.chains() if self._has_reasoner else None
        if rows is not None and chains is not None:
            rows = rows.masked_fill(chains, 0)
        trees = DraftBatch(shape, root.lengths, slot_table, *state.draws, chains, rows)
        drafter = step if step is not None and step.can_draft(trees, root.state) else self.drafter
        drafts = self._draft_clock.time(shape, partial(drafter.draft_tree, trees, root.tokens, root.state))
        if limits is not None:
            limits.apply(drafts.tree, self.drafter.lookups, rows)
        return self._keep(state, drafts, limits)

    def _is_looked_up(self, request_id: str) -> bool:
        return self._lookup_rows is not None and request_id in self._lookup_rows

    def _choose(self, state: StepState, limits: Limits | None) -> Shape:
        """The shape of the drafts of this step; where the scheduler is ahead it chose among earlier wishes of ours."""
        if state.in_prompts.all():
            return PLAIN
        drafting = state.batch.b if limits is None else len(limits.drafting)
        self._wanted = self._shapes.choose(state.batch, self._deferred.rows_of_requests, drafting)
        return state.shape or self._wanted

    def _keep(self, state: StepState, drafts: Drafts, limits: Limits | None = None) -> Tensor:
        """Keep drafts until the step that verifies them; returns their tokens [b, W - 1]."""
        whole = not state.in_prompts.any()
        step = self._step if self._step is not None and self._step.holds(drafts) else None
        sum_up = PathSums.__call__ if step is None else partial(step.path_sums, drafts.shape, state.is_greedy)
        self._shapes.launched(state.batch, drafts, whole, sum_up, None if limits is None else limits.drafting)
        self._store.put(state.names, drafts, step is not None)
        if not self._has_reasoner:
            state.keep_parents(drafts)
        tokens = padded(drafts.tree.tokens[:, 1:], state.placeholders)
        return tokens if step is None else tokens.clone()  # the engine may copy them to the host later

    def _catch_up(self, names: Sequence[str]) -> None:
        """Let the head read what it has not read of these requests: no cost of the plain round that ends."""
        if self._deferred.rows_of_requests:
            self._shapes.end_round()
        self._read_deferred(names)

    def _read_deferred(self, owners: Iterable[Owner]) -> None:
        """Let the head read what it has not read of these requests or blocks."""
        for rows in self._deferred.take(owners, self.max_num_tokens):
            self.drafter.read_deferred(rows)
