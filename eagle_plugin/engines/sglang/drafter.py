"""Drafts the tree: one forward of the head per level, every draft node attending to its own ancestors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch.nn.functional import pad

from eagle_plugin.core.policy import MAX_TOP_M
from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.rng import draft_uniforms
from eagle_plugin.engines.round import Drafts, HeadState, LevelRows, RecurrentLevels, TopM, TreeRows, draft, top_m_of
from eagle_plugin.engines.sglang.attention import TreeAttention
from eagle_plugin.engines.sglang.batch import RoundBatch
from eagle_plugin.engines.sglang.draft_weights import use_int8_weights


@dataclass
class TreeDraftInput(EagleDraftInput):
    """The engine's draft input of a forward over nodes of draft trees, for `TreeAttention`."""

    tree_rows: TreeRows | None = None


@dataclass
class TreeExtendInput(EagleDraftExtendInput):
    """The engine's input of the forward that reads the accepted paths, for `TreeAttention`."""

    tree_rows: TreeRows | None = None


class TreeDrafter(EagleDraftWorker):
    """The engine's draft worker (weights, pools, the prefill pass) with our drafting in a decode round."""

    def init_attention_backend(self) -> None:
        """Wrap the head's attention backend and round its weights; the engine's per-branch backends are not built."""
        self.tree_attention = TreeAttention(self.draft_runner.attn_backend)
        self.draft_runner.attn_backend = self.tree_attention
        self.draft_attn_backend = self.tree_attention
        self.draft_extend_attn_backend = self.tree_attention
        self.draft_runner.draft_attn_backend = self.tree_attention
        # The engine's prefill pass lists so many tokens after the prompt: sampled children are drawn from the list.
        self.topk = min(MAX_TOP_M, self._draft_vocabulary())
        self._chain = chain_ancestors(MAX_WIDTH, self.draft_runner.device)
        self._most_children: int = get_spec().speculative_eagle_topk
        use_int8_weights(self.draft_runner.model, self.target_worker.model_runner.model)

    def draft(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own drafting keeps one history per branch; a caller of it would get another tree."""
        raise RuntimeError("SGLang called EagleDraftWorker.draft on the plugin's drafter; it drafts by draft_tree()")

    def _draft_vocabulary(self) -> int:
        mapped = self.hot_token_id
        return int(self.draft_runner.model_config.vocab_size if mapped is None else len(mapped))

    def draft_tree(self, batch: RoundBatch, state: EagleDraftInput) -> Drafts:
        """Draft one tree per request.

        state holds what the last accepted row of the head left: topk_p (log probabilities here, see the worker) and
        topk_index [b, M], hidden_states [b, H], and bonus_tokens [b], the roots.
        """
        top_m = top_m_of(batch.shape, batch.is_greedy)
        after_root = HeadState(TopM(state.topk_p, state.topk_index), state.hidden_states)

        def forward(rows: LevelRows) -> tuple[torch.Tensor, torch.Tensor]:
            output = self._forward(
                batch,
                mode=ForwardMode.DECODE,
                tokens=rows.tokens,
                positions=rows.positions,
                slots=batch.window(rows.first_slot, rows.nodes).view(-1),
                info=TreeDraftInput(
                    hidden_states=rows.hidden,
                    num_tokens_per_req=rows.nodes,
                    num_tokens_for_logprob_per_req=rows.nodes,
                    tree_rows=batch.tree_rows(rows.ancestors, rows.tail),
                ),
            )
            return output.next_token_logits, output.hidden_states

        return draft(
            batch.shape,
            state.bonus_tokens.long(),
            RecurrentLevels(batch.shape, after_root, batch.prefix_lens, top_m, forward),
            batch.sampling,
            None if batch.is_greedy else draft_uniforms(batch.keys, batch.prefix_lens, batch.shape),
            self.hot_token_id,
        )

    def extend(self, batch: RoundBatch, accepted: Accepted, hidden: torch.Tensor) -> EagleDraftInput:
        """Feed the accepted tokens to the head and list the most likely children of the next root.

        accepted.tokens [b, E] and hidden [b * E, H of the target's features] are each request's accepted path; rows
        after its length write keys after the new committed length, which the next round overwrites.
        """
        b, longest = accepted.tokens.shape
        last = accepted.lengths.long() - 1
        places = torch.arange(longest, device=last.device)
        info = TreeExtendInput(
            hidden_states=hidden,
            num_correct_drafts=last,
            num_accept_tokens=accepted.lengths,
            num_tokens_per_req=longest,
            num_tokens_for_logprob_per_req=longest,
            select_index=torch.arange(0, b * longest, longest, device=last.device) + last,
            tree_rows=batch.tree_rows(self._chain[:longest].expand(b, longest).contiguous(), longest),
        )
        output = self._forward(
            batch,
            mode=ForwardMode.DRAFT_EXTEND_V2,
            tokens=accepted.tokens.reshape(-1),
            positions=(batch.prefix_lens[:, None] + places).reshape(-1),
            slots=batch.window(0, longest).view(-1),
            info=info,
        )
        # Greedy requests need no list to draw from; the columns stay, because SGLang concatenates batches.
        top_m = self._most_children if batch.is_greedy else self.topk
        logp, index = TopM.of(output.next_token_logits, top_m)
        return EagleDraftInput(
            topk_p=pad(logp, (0, self.topk - top_m), value=-torch.inf),
            topk_index=pad(index, (0, self.topk - top_m)),
            hidden_states=output.hidden_states,
            bonus_tokens=accepted.tokens.gather(1, last[:, None])[:, 0].int(),
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )

    def _forward(
        self,
        batch: RoundBatch,
        *,
        mode: ForwardMode,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        info: TreeDraftInput | TreeExtendInput,
    ) -> Any:
        """One forward of the head over tree rows, past the engine's per-forward planning, which knows no trees."""
        forward_batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(batch.requests),
            input_ids=tokens,
            req_pool_indices=batch.requests,
            seq_lens=batch.prefix_lens,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            spec_info=info,
            spec_algorithm=self.speculative_algorithm,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        with forward_context(ForwardContext(attn_backend=self.tree_attention), forward_batch=forward_batch):
            return self.draft_runner.model.forward(tokens, positions, forward_batch)


def chain_ancestors(length: int, device: torch.device | str) -> torch.Tensor:
    """Ancestor bitmasks [length] int64 holding uint64 bits of a chain: row i has the bits 0 .. i; length <= 64."""
    bits = torch.arange(length, device=device)
    # In two steps: the last row may have all 64 bits, and 1 << 64 is not defined.
    return ((torch.ones_like(bits) << bits) - 1) * 2 + 1
