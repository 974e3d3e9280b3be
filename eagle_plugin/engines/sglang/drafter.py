"""Drafts the tree: one forward of the head a level, every draft node attending to its own ancestors."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch.nn.functional import pad

from eagle_plugin.core.policy import MAX_TOP_M
from eagle_plugin.core.tree import DraftTree, Frontier
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.growth import Growth
from eagle_plugin.engines.sglang.attention import TreeAttention
from eagle_plugin.engines.sglang.draft_weights import use_int8_weights
from eagle_plugin.engines.sglang.round import Round
from eagle_plugin.kernels.sampling import Proposals
from eagle_plugin.kernels.tree import topk_log_softmax


class TreeDrafter(EagleDraftWorker):
    """The engine's draft worker (weights, pools, the prefill pass) with our drafting in a decode round.

    EAGLE shifts by one: the draft row at position j reads token j + 1 and the state of position j. So a tree node of
    depth d is a draft row at position L + d - 1 and a target row at position L + d.
    """

    def init_attention_backend(self) -> None:
        """Wrap the head's attention backend and round its weights; the engine's per-branch backends are not built."""
        self.tree_attention = TreeAttention(self.draft_runner.attn_backend)
        self.draft_runner.attn_backend = self.tree_attention
        self.draft_attn_backend = self.tree_attention
        self.draft_extend_attn_backend = self.tree_attention
        self.draft_runner.draft_attn_backend = self.tree_attention
        self._chain_words: dict[int, torch.Tensor] = {}
        # The engine's prefill pass lists this many tokens for the root; sampled children are drawn from the list.
        self.topk = min(MAX_TOP_M, self._draft_vocabulary())
        self._most_children: int = get_spec().speculative_eagle_topk
        use_int8_weights(self.draft_runner.model, self.target_worker.model_runner.model)

    def draft(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own drafting keeps one history a branch; a caller of it would get another tree."""
        raise RuntimeError("SGLang called EagleDraftWorker.draft on the plugin's drafter; it drafts by grow()")

    def _draft_vocabulary(self) -> int:
        mapped = self.hot_token_id
        return int(self.draft_runner.model_config.vocab_size if mapped is None else len(mapped))

    def grow(self, round: Round, state: EagleDraftInput) -> tuple[DraftTree, Proposals]:
        """Draft one tree a request.

        state holds what the last accepted row of the head left: topk_p and topk_index [b, M] (the head's best tokens
        after the root), hidden_states [b, H] and bonus_tokens [b] (the root).
        """
        steps, topk, _ = round.shape
        numbers = None if round.is_greedy else round.draft_numbers()
        growth = Growth(round.shape, round.sampling, numbers, self.hot_token_id)
        frontier = growth.add_level(1, state.topk_p.log(), state.topk_index, None)
        hidden = state.hidden_states[:, None]  # [b, rows of the previous frontier, H]
        listed = topk if round.is_greedy else self.topk
        for level in range(1, steps):
            logits, hidden = self._read_frontier(round, level, frontier, hidden)
            logp, index = topk_log_softmax(logits, listed)
            frontier = growth.add_level(level + 1, logp, index, frontier)
        return growth.select(state.bonus_tokens.long()), growth.proposals()

    def _read_frontier(
        self, round: Round, level: int, frontier: Frontier, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the frontier of a level: its logits [b * F, V] and hidden states [b, F, H]."""
        topk = round.shape.topk
        b, rows = frontier.tokens.shape
        first = (level - 1) * topk
        parents = frontier.parent_rows[:, :, None].expand(b, rows, hidden.shape[-1])
        output = self._forward(
            round,
            mode=ForwardMode.DECODE,
            tokens=frontier.tokens.reshape(-1),
            positions=(round.prefix_lens + (level - 1)).repeat_interleave(rows),
            slots=round.window(first, rows).view(-1),
            ancestors=frontier.ancestors,
            tail=first + rows,
            info=EagleDraftInput(
                hidden_states=hidden.gather(1, parents).view(b * rows, -1),
                num_tokens_per_req=rows,
                num_tokens_for_logprob_per_req=rows,
            ),
        )
        return output.next_token_logits, output.hidden_states.view(b, rows, -1)

    def extend(self, round: Round, accepted: Accepted, hidden: torch.Tensor) -> EagleDraftInput:
        """Feed the accepted tokens to the head and propose the next root's children.

        accepted.tokens [b, E] and hidden [b * E, H of the target's features] are each request's accepted path; rows
        behind its length write keys behind the new committed length, which the next round overwrites.
        """
        b, max_accept_length = accepted.tokens.shape
        last = accepted.lengths.long() - 1
        select = torch.arange(0, b * max_accept_length, max_accept_length) + last
        info = EagleDraftExtendInput(
            hidden_states=hidden,
            num_correct_drafts=last,
            num_accept_tokens=accepted.lengths,
            num_tokens_per_req=max_accept_length,
            num_tokens_for_logprob_per_req=max_accept_length,
            select_index=select,
        )
        output = self._forward(
            round,
            mode=ForwardMode.DRAFT_EXTEND_V2,
            tokens=accepted.tokens.reshape(-1),
            positions=(round.prefix_lens[:, None] + torch.arange(max_accept_length)).reshape(-1),
            slots=round.window(0, max_accept_length).view(-1),
            ancestors=self._chain(max_accept_length).expand(b, max_accept_length).contiguous(),
            tail=max_accept_length,
            info=info,
        )
        # Greedy requests need no list to draw from; the columns stay, because batches are merged.
        listed = self._most_children if round.is_greedy else self.topk
        logp, index = topk_log_softmax(output.next_token_logits, listed)
        return EagleDraftInput(
            topk_p=pad(logp.exp(), (0, self.topk - listed)),
            topk_index=pad(index, (0, self.topk - listed)),
            hidden_states=output.hidden_states,
            bonus_tokens=accepted.tokens.gather(1, last[:, None])[:, 0].int(),
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )

    def _chain(self, length: int) -> torch.Tensor:
        """Ancestor words [1, length] of a chain: word i has the bits 0 .. i."""
        if length not in self._chain_words:
            words = [(1 << (i + 1)) - 1 for i in range(length)]
            self._chain_words[length] = torch.tensor([words], dtype=torch.int64)
        return self._chain_words[length]

    def _forward(
        self,
        round: Round,
        *,
        mode: ForwardMode,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        ancestors: torch.Tensor,
        tail: int,
        info: EagleDraftInput | EagleDraftExtendInput,
    ) -> Any:
        """One forward of the head over tree rows, past the engine's per-forward planning, which knows no trees."""
        forward_batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(round.rows),
            input_ids=tokens,
            req_pool_indices=round.rows,
            seq_lens=round.prefix_lens,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            spec_info=info,
            spec_algorithm=self.speculative_algorithm,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        self.tree_attention.set_tree(round.tree_batch(ancestors, tail))
        with forward_context(ForwardContext(attn_backend=self.tree_attention), forward_batch=forward_batch):
            output = self.draft_runner.model.forward(tokens, positions, forward_batch)
        self.tree_attention.set_tree(None)
        return output
