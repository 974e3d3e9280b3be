"""Verifies a draft tree: one forward of the target, the walk, the move of the accepted keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.round import Drafts, KVCaches, TreeRows, accept, accepted_rows
from eagle_plugin.engines.sglang.batch import RoundBatch
from eagle_plugin.engines.sglang.logits import transform_logits
from eagle_plugin.engines.sglang.penalties import NodePenalties
from eagle_plugin.engines.sglang.ranks import RankAgreement
from eagle_plugin.kernels.tree import sibling_links


@dataclass
class TreeVerifyInput(EagleVerifyInput):
    """The engine's verify input without its masks and links: our attention reads ancestor bitmasks."""

    tree_rows: TreeRows | None = None


class TreeVerifier:
    """Verification against one target worker of SGLang (``TpModelWorker``)."""

    def __init__(self, target_worker: Any, req_to_token_pool: Any, allocator: Any, ranks: RankAgreement) -> None:
        self.penalties = NodePenalties()
        self._worker = target_worker
        self._ranks = ranks
        self._req_to_token_pool = req_to_token_pool
        pool = allocator.get_kvcache()
        # The engine's own bound of slots: slot 0 is padding.
        self._caches = KVCaches(pool.data_ptrs.view(torch.int64), pool.data_strides, pool.size + pool.page_size)

    def verify(
        self, batch: RoundBatch, schedule_batch: Any, drafts: Drafts, grammar_barrier: Any
    ) -> tuple[GenerationBatchResult, Accepted]:
        """Verify one tree per request; returns the scheduler's result and the accepted paths.

        schedule_batch is the round's ``ScheduleBatch``, mutated as the engine's worker does. The result's hidden states
        [b * E, H of the target's features] are those of the accepted paths.
        """
        tree, width = drafts.tree, drafts.shape.width
        window = batch.window(0, width)
        schedule_batch.spec_info = self._verify_input(batch, drafts, window)
        forward_batch, can_run_graph = eagle_prepare_for_verify(
            schedule_batch.spec_info, self._req_to_token_pool, schedule_batch, self._worker
        )
        # The tree is copied to the host before the forward; the grammar's mask is made there while the target runs.
        grammar_tree = None
        if schedule_batch.has_grammar:
            grammar_tree = GrammarTree.from_device(*sibling_links(tree.parents), tree.tokens)
        forward = self._worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        output = forward.logits_output
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=schedule_batch.reqs,
                tree=grammar_tree,
                sampling_info=schedule_batch.sampling_info,
                device=tree.tokens.device,
                barrier=grammar_barrier,
            )
        logits = output.next_token_logits
        transform_logits(schedule_batch, tree, logits, self.penalties, grammar_mask)
        accepted = accept(drafts, logits, batch.sampling, batch.keys, batch.prefix_lens, filters="joint")
        accepted = self._ranks.agree(accepted)
        self._caches.move_accepted(window, accepted)

        path = accepted_rows(accepted, width)  # [b, E]
        output.hidden_states = output.hidden_states[path.view(-1)]
        if schedule_batch.return_logprob:
            compute_spec_logprobs(schedule_batch, output, _next_tokens(accepted, width), accept_index=path)
        result = GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.view(-1),
            can_run_cuda_graph=can_run_graph,
            speculative_num_draft_tokens=width,
            speculative_output_stride=drafts.shape.max_accept_length,
            accept_lens=accepted.lengths,
            accept_index=accepted.index,
            new_seq_lens=batch.prefix_lens + accepted.lengths,
            routed_experts_output=forward.routed_experts_output,
            indexer_topk_output=forward.indexer_topk_output,
            extra_keep_alive_refs=[forward_batch],
        )
        return result, accepted

    def _verify_input(self, batch: RoundBatch, drafts: Drafts, window: torch.Tensor) -> TreeVerifyInput:
        tree, (steps, topk, width) = drafts.tree, drafts.shape
        return TreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            custom_mask=None,
            positions=(batch.prefix_lens[:, None] + tree.depths).reshape(-1),
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=steps,
            topk=topk,
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            prepared_out_cache_loc=window.view(-1),
            tree_rows=batch.tree_rows(tree.ancestors, width),
        )


def _next_tokens(accepted: Accepted, width: int) -> torch.Tensor:
    """The token that follows each node of the accepted paths, [b * W] int64; of other nodes 0."""
    node = accepted.index.long()
    # Places without a node go to the last column.
    tokens = torch.zeros(len(node), width + 1, dtype=torch.int64, device=node.device)
    return tokens.scatter_(1, node.where(node >= 0, width), accepted.tokens)[:, :width].reshape(-1)
