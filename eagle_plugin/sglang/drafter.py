"""Drafts the trees: by one forward of the head per level, in which every node attends to its own ancestors, or by one
forward over masked rows for all levels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from eagle_plugin.core.propose import MAX_TOP_M
from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import AcceptedPath
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.runtime.parallel_levels import HeadLevels
from eagle_plugin.runtime.round import Drafts, HeadState, LevelRows, LevelSource, TopM, TreeRows, draft, top_m_of
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.draft_classes import is_mtp_layer
from eagle_plugin.sglang.draft_weights import use_int8_weights
from eagle_plugin.sglang.eagle3_model import mask_of
from eagle_plugin.sglang.forward import TreeForward
from eagle_plugin.sglang.releases import sharded_as_drafter


@dataclass
class TreeDraftInput(EagleDraftInput):
    """The engine's draft input of a forward over nodes of draft trees, for `TreeAttention`."""

    tree_rows: TreeRows | None = None
    slot_table: Tensor | None = None


@dataclass
class TreeExtendInput(EagleDraftExtendInput):
    """The engine's input of the forward that reads the accepted paths, for `TreeAttention`."""

    tree_rows: TreeRows | None = None
    slot_table: Tensor | None = None


class DraftState(NamedTuple):
    """What a round begins with, of b requests."""

    head: HeadState
    roots: Tensor  # [b] int64: the last committed tokens


class TreeDrafter(EagleDraftWorker):
    """The engine's draft worker (weights, pools, the prefill pass) with our drafting in a decode round."""

    levels = HeadLevels()
    lookups: Lookups | None = None  # where branches are looked up

    def init_lm_head(self) -> None:
        """Share the target's embedding and output layer, as the engine does it."""
        with _no_gpu_awaited() if self.device == "cpu" else contextlib.nullcontext():
            super().init_lm_head()

    def init_attention_backend(self) -> None:
        """Wrap the head's attention backend and round its weights; the engine's per-branch backends are not built."""
        self.tree_attention = TreeAttention(self.draft_runner.attn_backend)
        self.draft_runner.attn_backend = self.tree_attention
        self.draft_attn_backend = self.tree_attention
        self.draft_extend_attn_backend = self.tree_attention
        self.draft_runner.draft_attn_backend = self.tree_attention
        # The engine's prefill pass lists so many tokens after the prompt: children are those with the most noise.
        self.topk = min(MAX_TOP_M, self._draft_vocabulary())
        self._chain = chain_ancestors(MAX_WIDTH, self.draft_runner.device)
        self._nothing = no_tokens(self.topk, self.draft_runner.device)
        self._most_children: int = get_spec().speculative_eagle_topk
        self._forward = TreeForward(self.draft_runner, self.tree_attention)
        self.levels = HeadLevels(mask_of(self.draft_runner.model))
        use_int8_weights(self.draft_runner.model, self.target_worker.model_runner.model)

    def _capture_cuda_graphs(self) -> None:
        """The engine's own drafting is not captured; ours is, by `DecodeRound.capture`."""
        self.cuda_graph_runner = None
        self.cuda_graph_runner_for_draft_extend = None

    def draft(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own drafting keeps one history per branch; a caller of it would get another tree."""
        raise RuntimeError("SGLang called EagleDraftWorker.draft on the plugin's drafter; it drafts by draft_tree()")

    def _draft_vocabulary(self) -> int:
        mapped = self.hot_token_id
        return int(self.draft_runner.model_config.vocab_size if mapped is None else len(mapped))

    @property
    def is_own_layer(self) -> bool:
        """Whether an MTP layer of the target drafts, which is among the target's own tensors."""
        return is_mtp_layer(self.draft_runner.model_config.hf_config.architectures[0])

    def relayed(self, info: Any) -> DraftState:
        """What the engine has carried from the round before, in one of `carried` or of a prefill."""
        return DraftState(HeadState(TopM(info.topk_p, info.topk_index), info.hidden_states), info.bonus_tokens.long())

    def carried(self, state: DraftState, new_lens: Tensor) -> Any:
        """What the engine carries to the next round of requests with these lengths [b]; topk_p are logarithms."""
        return EagleDraftInput(
            topk_p=state.head.top.logp,
            topk_index=state.head.top.tokens,
            hidden_states=state.head.hidden,
            bonus_tokens=state.roots,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )

    def draft_tree(self, batch: RoundBatch, state: DraftState) -> Drafts:
        """Draft one tree per request from what the last accepted row of the head left."""
        with self._contexts():
            return draft(
                batch.shape,
                state.roots,
                self._levels(batch, state, top_m_of(batch.shape, batch.is_greedy)),
                batch.sampling,
                None if batch.is_greedy else batch.rng_keys,
                batch.prefix_lens,
                self.hot_token_id,
                lookup=None if self.lookups is None else self.lookups.of(batch.requests),
            )

    def _levels(self, batch: RoundBatch, state: DraftState, top_m: int) -> LevelSource | TopM:
        """Where the levels of a round's trees come from; top_m: how many tokens to list per node."""

        def forward(rows: LevelRows) -> tuple[Tensor, Tensor]:
            output = self._forward(
                batch,
                mode=ForwardMode.DECODE,
                hidden=CaptureHiddenMode.LAST,
                tokens=rows.tokens,
                positions=rows.positions,
                slots=batch.window(rows.first_slot, rows.nodes).view(-1),
                info=TreeDraftInput(
                    hidden_states=rows.hidden,
                    num_tokens_per_req=rows.nodes,
                    num_tokens_for_logprob_per_req=rows.nodes,
                    tree_rows=batch.tree_rows(rows.ancestors, rows.tail),
                    slot_table=batch.start.table,
                ),
            )
            return output.next_token_logits, output.hidden_states

        return self.levels.source(batch.shape, state.head, batch.prefix_lens, top_m, forward)

    def extend(self, batch: RoundBatch, accepted: Accepted, path: AcceptedPath, hidden: Tensor) -> DraftState:
        """Feed the accepted tokens to the head and list the most likely children of the next root.

        accepted.tokens [b, E] and hidden [b * E, H of the target's features] are each request's accepted path; rows
        after its length write keys after the new committed length, which the next round overwrites.
        """
        b, longest = accepted.tokens.shape
        info = TreeExtendInput(
            hidden_states=hidden,
            num_accept_tokens=accepted.lengths,
            num_tokens_per_req=longest,
            num_tokens_for_logprob_per_req=longest,
            select_index=path.last,
            tree_rows=batch.tree_rows(self._chain[:longest].expand(b, longest).contiguous(), longest),
            slot_table=batch.start.table,
        )
        with self._contexts():
            output = self._forward(
                batch,
                mode=ForwardMode.DRAFT_EXTEND_V2,
                hidden=CaptureHiddenMode.LAST,
                tokens=accepted.tokens.reshape(-1),
                positions=path.positions.view(-1),
                slots=batch.window(0, longest).view(-1),
                info=info,
            )
        # Greedy requests need no list to draw from; the columns stay, because SGLang concatenates batches.
        top_m = self._most_children if batch.is_greedy else self.topk
        logp, index = TopM.of(output.next_token_logits, top_m)
        if top_m < self.topk:
            logp, index = (
                torch.cat([values, none[:, top_m:].expand(b, -1)], dim=1)
                for values, none in zip((logp, index), self._nothing, strict=True)
            )
        top = TopM(logp, index)
        return DraftState(HeadState(top, output.hidden_states), path.roots)

    @contextlib.contextmanager
    def _contexts(self) -> Iterator[None]:
        """Around every forward of the head: how the engine shards it."""
        with (
            sharded_as_drafter(self),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield


@contextlib.contextmanager
def _no_gpu_awaited() -> Iterator[None]:
    """Where there is no GPU: SGLang's classes for most MTP layers wait for one after they have shared weights,
    and end the start (docs/upstream.md)."""
    original = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = original


def no_tokens(count: int, device: torch.device | str) -> TopM:
    """A row [1, count] of impossible tokens."""
    return TopM(
        torch.full((1, count), -torch.inf, device=device), torch.zeros(1, count, dtype=torch.int64, device=device)
    )
