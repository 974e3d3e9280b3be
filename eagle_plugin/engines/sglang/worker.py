"""The worker that SGLang's scheduler drives: draft a tree, verify it, feed what was accepted to the head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.engines.rng import KeyTable
from eagle_plugin.engines.round import Drafts
from eagle_plugin.engines.sglang.attention import TreeAttention
from eagle_plugin.engines.sglang.batch import RoundBatch
from eagle_plugin.engines.sglang.drafter import TreeDrafter
from eagle_plugin.engines.sglang.logits import needs_plain_round
from eagle_plugin.engines.sglang.ranks import RankAgreement
from eagle_plugin.engines.sglang.sampling import SeededSampler, request_seeds
from eagle_plugin.engines.sglang.verifier import TreeVerifier


class TreeWorker(EAGLEWorkerV2):
    """EAGLE-2 / EAGLE-3 with dynamic draft trees; the user's flags are the caps of every round's shape.

    A subclass of the engine's worker, so that whatever the engine asks of that class holds here too. Its constructor is
    not called: it would build the engine's own draft worker. Every attribute that it sets is set here
    (``tests/engines/sglang/test_contract.py`` compares the two lists).
    """

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
        self._draft_worker = TreeDrafter(server_args, gpu_id, nccl_port, target_worker)
        self.adaptive_controller = None
        # Read by the engine's worker only on paths that are not ours; kept so that the two stay interchangeable.
        self.num_new_pages_per_topk = torch.empty((), dtype=torch.int64, device=self.device)
        self.extend_lens = torch.empty((), dtype=torch.int64, device=self.device)
        self.plan_stream, self.plan_stream_ctx = None, contextlib.nullcontext()
        self.shape = Shape(self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens)

    def init_attention_backends(self) -> None:
        """Wrap the target's attention backend and the head's, after the engine has made both."""
        super().init_attention_backends()
        runner = self._target_worker.model_runner
        for pool in (runner.token_to_kv_pool, self._draft_worker.draft_runner.token_to_kv_pool):
            if not isinstance(pool, MHATokenToKVPool) or pool.use_hnd:
                raise ValueError(
                    f"eagle-plugin cannot read a KV cache of type {type(pool).__name__}, it reads MHATokenToKVPool "
                    "in token-major layout: start the server with EAGLE_PLUGIN=0"
                )
        runner.attn_backend = TreeAttention(runner.attn_backend)
        self._sampler = runner.sampler = SeededSampler()
        rows = len(self.req_to_token_pool.req_to_token)
        self._keys = KeyTable(rows, self.device, self._target_worker.random_seed)  # the seed of all ranks
        ranks = RankAgreement(get_parallel().tp_group, rows, self.shape.max_accept_length, self.device)
        pools = self.req_to_token_pool, self.token_to_kv_pool_allocator
        self._verifier = TreeVerifier(self._target_worker, *pools, ranks)

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """One scheduler step over a ``ScheduleBatch``: a prefill as the engine does it, or one decode round of ours."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._draw_keys(batch)
            self._verifier.penalties.apply_after_prefill(batch)
            result = self._forward_prefill_batch(batch, on_publish, pp_proxy_tensors)
            state = result.next_draft_input
            state.topk_p = state.topk_p.log()  # the engine's prefill gives probabilities, the rounds read logarithms
            return result
        state = batch.spec_info
        shape = PLAIN if needs_plain_round(batch) else self.shape
        inputs = RoundBatch.read(shape, batch, self.req_to_token_pool.req_to_token, self._keys)
        with self._draft_contexts():
            if shape == PLAIN:
                drafts = Drafts.plain(state.bonus_tokens)
            else:
                drafts = self._draft_worker.draft_tree(inputs, state)
        result, accepted = self._verifier.verify(inputs, batch, drafts, grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        with self._draft_contexts():
            hidden = result.logits_output.hidden_states
            result.next_draft_input = self._draft_worker.extend(inputs, accepted, hidden)
        return result

    def _draw_keys(self, batch: Any) -> None:
        """New keys for the requests of a prefill, whose next tokens are drawn by them if any of these has a seed."""
        rows, seeds = batch.req_pool_indices.long(), request_seeds(batch.reqs)
        self._keys.draw(rows, seeds)
        self._sampler.use_keys(self._keys.of(rows) if seeds else None)

    @contextlib.contextmanager
    def _draft_contexts(self) -> Iterator[None]:
        with (
            draft_tp_context(self._draft_worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield
