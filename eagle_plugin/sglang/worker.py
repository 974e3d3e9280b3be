"""Serves SGLang's scheduler: drafts a tree per request, verifies it, and feeds what was accepted to the head."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.common import use_intel_amx_backend
from sglang.srt.utils.device_timer import device_timer_ctx

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.heads.manifest import trained_depths
from eagle_plugin.policy.chooser import ShapeChooser, policy_mode
from eagle_plugin.policy.costs import DEFERRED_TOKENS
from eagle_plugin.runtime.accept import accepted_rows
from eagle_plugin.runtime.collect_start import check_collecting
from eagle_plugin.runtime.draft_clock import DraftClock
from eagle_plugin.runtime.draft_map import repeated_tokens
from eagle_plugin.runtime.head_mailbox import HeadMailbox
from eagle_plugin.runtime.huge_pages import use_huge_pages
from eagle_plugin.runtime.lookups import lookups_of
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.request_limits import LimitMaker, Limits, served_sources
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.runtime.target_weights import use_bf16_kernel
from eagle_plugin.selftest.failure import LeftOut
from eagle_plugin.sglang.adapters import Adapters
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.batch import BatchReader, committed_tokens
from eagle_plugin.sglang.capture import prepare_rounds
from eagle_plugin.sglang.data_parallel import SharedRounds
from eagle_plugin.sglang.decode_reserve import reserve_for
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter
from eagle_plugin.sglang.eagle3_model import mask_of
from eagle_plugin.sglang.features import WorkerFeatures, last_states, worker_features
from eagle_plugin.sglang.head_exchange import mailbox_of
from eagle_plugin.sglang.image_tokens import read_image_tokens
from eagle_plugin.sglang.logits import needs_plain_round, transforms_of
from eagle_plugin.sglang.pools import SlidingReader, check_pools, chunk_of, pools_of, sliding_layers, windows_of
from eagle_plugin.sglang.ranks import rank_logger
from eagle_plugin.sglang.request_fields import sources_of
from eagle_plugin.sglang.round_costs import choose_shapes
from eagle_plugin.sglang.round_result import RoundResult, idle_result, round_result
from eagle_plugin.sglang.sampling import SeededSampler, request_seeds
from eagle_plugin.sglang.selftest import check_rounds, prepared
from eagle_plugin.sglang.synthetic import synthetic_rates
from eagle_plugin.sglang.verifier import TreeVerifier, grammar_tree, log_probabilities
from eagle_plugin.sglang.weight_updates import take_new_weights


class TreeWorker(EAGLEWorkerV2):
    """EAGLE-2, EAGLE-3 and P-EAGLE with dynamic draft trees; the user's flags are the caps of every round's shape.

    A subclass of the engine's worker, so that whatever the engine asks of that class holds here too. Its constructor is
    not called: it would build the engine's own draft worker. Every attribute that it sets is set here
    (``tests/engines/sglang/test_contract.py`` compares the two lists).
    """

    drafter_class: type[TreeDrafter] = TreeDrafter
    _mailbox: HeadMailbox | None = None  # where heads may be exchanged
    _features: WorkerFeatures | None = None  # where states are stored
    announce: Callable[[list[str]], None]  # says who serves, with the reasons where it is not this worker

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        BaseSpecWorker.__init__(self)
        spec = get_spec()
        self.server_args = server_args
        self.topk = spec.speculative_eagle_topk
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.gpu_id = gpu_id
        self.device = get_device().device
        self._target_worker = target_worker
        self.page_size = get_schedule().page_size
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
        self.enable_dp_spec_prefill_coordination = False
        self._hosts_draft = True
        self._draft_worker = self.drafter_class(server_args, gpu_id, nccl_port, target_worker)
        self.adaptive_controller = None
        # Read by the engine's worker only on paths that are not ours; kept so that the two stay interchangeable.
        self.num_new_pages_per_topk = torch.empty((), dtype=torch.int64, device=self.device)
        self.extend_lens = torch.empty((), dtype=torch.int64, device=self.device)
        self.plan_stream, self.plan_stream_ctx = None, contextlib.nullcontext()
        self.shape = self._caps(server_args)
        self.synthetic = synthetic_rates(self.shape.steps)  # None: acceptance is real
        self.shapes = ShapeChooser(self.shape, None)  # the policy comes when the costs of a round are known
        self._draft_clock = DraftClock(self.device, rank_logger(logging.getLogger("eagle_plugin")))
        self._limits = LimitMaker(self.device)

    def _caps(self, server_args: Any) -> Shape:
        """The caps of every round's trees."""
        caps = Shape(self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens)
        if mask_of(self._draft_worker.draft_runner.model) is None:
            return caps
        return caps.within_steps(trained_depths(server_args.speculative_draft_model_path))

    def init_attention_backends(self) -> None:
        """Wrap the target's attention backend and the head's, after the engine has made both."""
        super().init_attention_backends()
        target, pool = self._target_worker, self.req_to_token_pool
        runner, drafter = target.model_runner, self._draft_worker
        pools = pools_of(runner.token_to_kv_pool)
        check_pools((*pools, *pools_of(drafter.draft_runner.token_to_kv_pool)))
        layers, chunk = sliding_layers(runner.token_to_kv_pool), chunk_of(runner)
        attention = runner.attn_backend = TreeAttention(runner.attn_backend, layers, chunk)
        methods: tuple[type, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if any(getattr(layer, "use_fp32_lm_head", False) for layer in runner.model.modules()):
            methods = methods[:1]  # the engine computes the output layer in float32, and only by its own method
        use_bf16_kernel(runner.model, methods, use_intel_amx_backend)
        self._sampler = runner.sampler = SeededSampler()
        table = pool.req_to_token
        # The seed of all ranks; those with other requests (--dp-size, --attn-dp-size) must not draw alike.
        self._keys = KeyTable(len(table), self.device, target.random_seed + (get_parallel().dp_rank or 0))
        self._adapters = Adapters(runner)
        read_image_tokens(drafter.draft_runner.model, runner.model_config)
        parallel, allocator = get_parallel(), self.token_to_kv_pool_allocator
        replicas = parallel.attn_dp_size
        self._last = last_states(runner.model)
        self._verifier = TreeVerifier(target, attention, len(table), allocator, self.synthetic, replicas, self._last)
        self._shared = SharedRounds()
        alike = parallel.attn_tp_group  # the ranks that serve the same requests
        self._ranks = RankAgreement(alike, pool.size, self.shape.max_accept_length, self.device)
        reach, sliding = max(self.shape.reach, DEFERRED_TOKENS), None
        if layers:
            window = max(windows_of(runner.model), default=0)
            sliding = SlidingReader(pools[1], window, reach, pool.size, table.shape[1], chunk)
        block = drafter.levels.block
        self._reader = BatchReader(
            reach,
            pool.size,
            table,
            self._keys,
            sliding,
            runner.model_config.model_is_mrope,
            # What is captured for a width serves all shapes of that width: their slots have one layout.
            least=max(self.shape.reach, 0 if block is None else block.rows),
        )
        self._round = DecodeRound(drafter, self._verifier, self._reader, self._adapters)
        if self.synthetic is None:
            config, log = runner.model_config, rank_logger(logging.getLogger("eagle_plugin"))
            drafter.lookups = lookups_of(len(table), self.shape, table.shape[1], config.vocab_size, self.device, log)
        # The target's decode rounds are captured by us: the engine would capture its own attention, without trees.
        target.init_cuda_graphs = partial(target.init_cuda_graphs, capture_decode_cuda_graph=False)

    def init_cuda_graphs(self) -> None:
        """Capture the functions of our rounds, where the device has graphs and the user did not switch them off."""
        super().init_cuda_graphs()
        if self.device == "cpu":
            use_huge_pages(rank_logger(logging.getLogger("eagle_plugin")))
        pool, mode = self.req_to_token_pool, policy_mode()
        # Not kept for the next start, which may have another head.
        repeated = [LeftOut(reason) for reason in repeated_tokens(self._draft_worker.hot_token_id)]
        if not check_rounds(self, repeated or prepared(partial(prepare_rounds, self, mode))):
            check_collecting(repeated or ["its self-test has failed"])
            return  # the engine's own worker serves: there is no head of ours to exchange
        reserve_for(self)
        self.shapes = choose_shapes(self, mode, pool.size)
        if (lookups := self._draft_worker.lookups) is not None:
            self.shapes.looked_up = lookups.counts
            lookups.clear()  # what tests and measurements left
        assert self._round.deferred is not None
        self._round.deferred.clear()  # what tests and measurements left
        self._mailbox = mailbox_of(self)
        self._features = worker_features(self, self._last)

    @property
    def is_captured(self) -> bool:
        """Whether rounds are replayed."""
        return bool(self._round.shapes)

    def weights_updated(self) -> None:
        """The target or the head has other weights: what is known of its drafts is forgotten."""
        take_new_weights(self._draft_worker.draft_runner.model)
        self.shapes.forget_head()
        rank_logger(logging.getLogger("eagle_plugin")).info(
            "eagle-plugin: weights were updated; the draft head drafts on, and its drafts may be accepted less often"
        )

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """One scheduler step over a ``ScheduleBatch``: a prefill as the engine does it, or one decode round of ours."""
        if self._mailbox is not None:
            self._mailbox.look()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish, pp_proxy_tensors)
        is_idle = batch.forward_mode.is_idle()
        with device_timer_ctx(self._target_worker.model_runner.device_timer, "idle" if is_idle else "target_verify"):
            return self._idle_round(batch) if is_idle else self._decode(batch, on_publish, grammar_barrier)

    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> RoundResult:
        b, prefix_tokens = len(batch.seq_lens), committed_tokens(batch)
        deferred = 0 if self._round.deferred is None else self._round.deferred.longest(batch.reqs)
        is_plain = needs_plain_round(batch)
        limits = self._limits_of(batch)
        drafting = None if limits is None else limits.drafting
        requests = b if drafting is None else len(drafting)
        allowed = self._round.allowed(b)
        shape = PLAIN if is_plain else self.shapes.choose(b, prefix_tokens, allowed, deferred, requests)
        shape, most = self._shared.agree(shape, b, is_plain)
        shape = self._round.narrowed(shape, most)
        self.shapes.begin(shape, b, prefix_tokens)
        state = self._caught_up(batch, shape, deferred)
        verified = self._reader.read(shape, batch, self._round.padded_b(most, shape))
        # Without graphs the head does not run over what other ranks have more.
        inputs = verified if self._round.is_captured(verified) else verified.first(b)
        # From here on the round reads its own copy of the slots: the scheduler may change its table.
        table_was_read = torch.get_device_module(self.device).Event()
        table_was_read.record()

        drafts = self._draft_clock.time(shape, partial(self._round.draft, inputs, state))
        if limits is not None and shape != PLAIN:
            limits.apply(drafts.tree, self._draft_worker.lookups, inputs.requests)
        real = drafts.first(b)
        tree = grammar_tree(real.tree) if batch.has_grammar else None
        self._adapters.prepare(batch.reqs, shape.width, inputs.padded_b)
        output = self._round.verify(verified, drafts).first(inputs.padded_b * shape.width)
        logits = output.logits[: b * shape.width]
        transforms = transforms_of(batch)
        if transforms:
            accepted = self._verifier.walk_with_transforms(inputs, batch, real, logits, tree, grammar_barrier)
        else:
            accepted = self._round.walk(inputs, drafts, output)
        accepted = self._ranks.agree(accepted)
        if "penalties" in transforms:
            self._verifier.penalties.count(inputs, accepted)
        kept = Accepted(*(values[:b] for values in accepted))
        new_lens = inputs.prefix_lens[:b] + kept.lengths
        if on_publish is not None:
            on_publish(new_lens)
        logprobs = log_probabilities(batch, logits, kept, shape.width) if batch.return_logprob else None
        features = output.features[accepted_rows(kept, shape.width).view(-1)] if batch.return_hidden_states else None
        if self._features is not None:
            assert output.last is not None
            self._features.round(batch.reqs, inputs, real.tree.tokens, kept, output.features, output.last)
        read = partial(self._round.extend, inputs, accepted, output, state)
        state = self._draft_clock.time_reading(shape, read)
        captured, carried = self._round.is_captured(inputs), self._draft_worker.carried
        result = round_result(inputs, kept, new_lens, state, logprobs, features, captured, carried)
        path_sums = partial(self._round.path_sums, inputs)
        result.served = self.shapes.launched(shape, b, prefix_tokens, real, path_sums, drafting)
        if self._round.sizes():
            result.eager_reasons = transforms if result.can_run_cuda_graph else ["batch size"]
        self._draft_worker.draft_runner.shared_read_done_event = table_was_read
        return result

    def _caught_up(self, batch: Any, shape: Shape, longest: int) -> DraftState:
        """What a round begins with; the head reads the tokens of plain rounds first, if it drafts or they are many.

        longest: no request has more of them.
        """
        state, deferred = self._draft_worker.relayed(batch.spec_info), self._round.deferred
        if deferred is not None and longest and (longest >= deferred.most or shape != PLAIN):
            if shape == PLAIN:
                self.shapes.pause()  # it counts for every plain round: `CostModel.most_deferred`
            return deferred.read(batch, self._reader, self._draft_worker, state, longest)
        return state

    def _limits_of(self, batch: Any) -> Limits | None:
        """What the requests of a batch ask for, where it changes their trees."""
        if not any(request.sampling_params.custom_params for request in batch.reqs):
            return None
        has_lookups = self._draft_worker.lookups is not None
        return self._limits.of([served_sources(asked, has_lookups) for asked in sources_of(batch.reqs)])

    def _idle_round(self, batch: Any) -> RoundResult:
        """A round without requests, beside those of other ranks of data-parallel attention."""
        self.shapes.pause()
        shape, most = self._shared.agree(PLAIN, 0)
        shape = self._round.narrowed(shape, most)
        inputs = self._reader.padding(shape, self._round.padded_b(most, shape), is_greedy=True)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._round.verify(inputs, Drafts(DraftTree.padding(nothing, shape.width), shape))
        return idle_result(shape, batch.seq_lens)

    def _prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any) -> Any:
        """The engine's prefill; the requests get new keys, by which their next tokens are drawn if any has a seed."""
        self.shapes.end_round(len(batch.reqs))
        if batch.forward_mode.is_idle():  # other ranks of data-parallel attention have prompts
            return self._forward_prefill_batch(batch, on_publish, pp_proxy_tensors)
        rows, seeds = batch.req_pool_indices.long(), request_seeds(batch.reqs)
        self._keys.draw(rows, seeds)
        self._sampler.use_keys(self._keys.of(rows) if seeds else None)
        if self._round.deferred is not None:
            self._round.deferred.forget(rows)
        penalties = self._verifier.penalties
        penalties.start(batch)
        result = self._forward_prefill_batch(batch, on_publish, pp_proxy_tensors)
        if self._features is not None:
            self._features.prefill(batch, result)
        penalties.count_prefill(batch, result.next_token_ids)
        if (lookups := self._draft_worker.lookups) is not None:
            # Also after a chunk of a prompt, whose next one begins the text again.
            lookups.begin(rows, [one.get_fill_ids() for one in batch.reqs], sources_of(batch.reqs))
            lookups.append_first(rows, result.new_seq_lens.long(), result.next_token_ids)
        state = result.next_draft_input
        # The engine's prefill gives probabilities, the rounds read logarithms. Features that overflowed give none.
        state.topk_p = state.topk_p.log().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return result
