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

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.sglang.attention import TreeBatch
from eagle_plugin.engines.sglang.penalties import NodePenalties
from eagle_plugin.engines.sglang.round import Round
from eagle_plugin.engines.sglang.targets import transform_logits
from eagle_plugin.kernels.kv import compact_kv
from eagle_plugin.kernels.sampling import Proposals, verify_tree
from eagle_plugin.kernels.tree import sibling_links


@dataclass
class TreeVerifyInput(EagleVerifyInput):
    """The engine's verify input without its masks and links: our attention reads ancestor words."""

    tree_batch: TreeBatch | None = None


class Verified:
    """What one verification hands on to the draft head and to the scheduler."""

    def __init__(self, accepted: Accepted, hidden: torch.Tensor, result: GenerationBatchResult) -> None:
        self.accepted = accepted
        self.hidden = hidden  # [b * E, H of the target's features]: states of the accepted path
        self.result = result


class TreeVerifier:
    """Verification against one target worker of SGLang (``TpModelWorker``)."""

    def __init__(self, target_worker: Any, req_to_token_pool: Any, allocator: Any) -> None:
        self.penalties = NodePenalties()
        self._worker = target_worker
        self._req_to_token_pool = req_to_token_pool
        pool = allocator.get_kvcache()
        self._caches = pool.data_ptrs.view(torch.int64), pool.data_strides  # base addresses and bytes a row
        self._cache_rows = pool.size + pool.page_size  # the engine's own bound: slot 0 is padding

    def verify(self, round: Round, batch: Any, tree: DraftTree, proposals: Proposals, grammar_barrier: Any) -> Verified:
        """Verify one tree a request; batch is the round's ``ScheduleBatch``, mutated as the engine's worker does."""
        width, max_accept_length = round.shape.width, round.shape.max_accept_length
        positions = (round.prefix_lens[:, None] + tree.depths).reshape(-1)
        window = round.window(0, width)
        batch.spec_info = self._verify_input(round, tree, positions, window)
        forward_batch, can_run_graph = eagle_prepare_for_verify(
            batch.spec_info, self._req_to_token_pool, batch, self._worker
        )
        # The tree leaves for the host before the forward, the mask is made under it.
        grammar_tree = GrammarTree.from_device(*sibling_links(tree.parents), tree.tokens) if batch.has_grammar else None
        forward = self._worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        output = forward.logits_output
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=tree.tokens.device,
                barrier=grammar_barrier,
            )
        logits = output.next_token_logits
        transform_logits(batch, tree, logits, self.penalties, grammar_mask)
        accepted = verify_tree(tree, logits, round.sampling, proposals, round.verify_numbers(), max_accept_length)
        compact_kv(*self._caches, window, accepted.index, accepted.lengths, slots=self._cache_rows)

        first_nodes = torch.arange(0, len(round.rows) * width, width)[:, None]
        path = (accepted.index.long().clamp(min=0) + first_nodes).view(-1)  # [b * E] node of each output row
        output.hidden_states = output.hidden_states[path]
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, _said(accepted, width), accept_index=path.view(-1, max_accept_length))
        result = GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.view(-1),
            can_run_cuda_graph=can_run_graph,
            speculative_num_draft_tokens=width,
            speculative_output_stride=max_accept_length,
            accept_lens=accepted.lengths,
            accept_index=accepted.index,
            new_seq_lens=round.prefix_lens + accepted.lengths,
            routed_experts_output=forward.routed_experts_output,
            indexer_topk_output=forward.indexer_topk_output,
            extra_keep_alive_refs=[forward_batch],
        )
        return Verified(accepted, output.hidden_states, result)

    def _verify_input(
        self, round: Round, tree: DraftTree, positions: torch.Tensor, window: torch.Tensor
    ) -> TreeVerifyInput:
        steps, topk, width = round.shape
        return TreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            custom_mask=None,
            positions=positions,
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
            tree_batch=round.tree_batch(tree.ancestors, width),
        )


def _said(accepted: Accepted, width: int) -> torch.Tensor:
    """The token that follows each node of the accepted paths, [b * W] int64; of other nodes 0."""
    node = accepted.index.long()
    said = torch.zeros(len(node), width + 1, dtype=torch.int64)  # what is no node goes to the last column
    return said.scatter_(1, node.where(node >= 0, width), accepted.tokens)[:, :width].reshape(-1)
