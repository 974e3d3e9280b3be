"""Runs a block drafter (DFlash, DSpark) in SGLang: one forward for all levels of a tree, as a round begins.

Its layers attend to keys and values that are made of the target's states of the accepted tokens, without a forward of
the drafter, and to a block: the root token and masks after it. The block's rows go into the slots after the accepted
tokens, where the target's rows of the tree follow; so nothing but the root is carried from round to round. DSpark's
Markov head adds a bias by the token before to what a level's row lists.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from torch import Tensor

from eagle_plugin.core.verify import Accepted
from eagle_plugin.heads.block_config import MARKOV, kind_of
from eagle_plugin.kernels.accepted_path import AcceptedPath
from eagle_plugin.runtime.parallel_levels import Block, BlockRows, HeadLevels, MarkovLevels, block_of, block_state
from eagle_plugin.runtime.round import HeadState, LevelSource, TopM
from eagle_plugin.sglang.attention import LayerCache, write_kv
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter, TreeDraftInput


class BlockDrafter(TreeDrafter):
    """The engine's draft worker for EAGLE heads, with a model that reads blocks."""

    hot_token_id = None  # a block drafter of SGLang has the target's vocabulary
    _is_causal = False  # whether a row of the block sees only those before it

    def _rebuild_topk1_chain_buffers(self) -> None:
        """The engine's own drafting of chains, which wants one step per drafted token, is not used."""

    def init_lm_head(self) -> None:
        """Take the target's embedding and output layer: SGLang's class has none."""
        target = self.target_worker.model_runner.model
        self._embedding = target.get_input_embeddings()
        self._output = target.lm_head
        (self._logits_processor,) = (layer for layer in target.modules() if isinstance(layer, LogitsProcessor))
        self._vocabulary: int = self.target_worker.model_runner.model_config.vocab_size
        scale = getattr(target, "get_dflash_noise_embedding_scale", None)
        self._embedding_scale = 1.0 if scale is None else float(scale())

    def init_attention_backend(self) -> None:
        """As for EAGLE heads; and read what the block is."""
        super().init_attention_backend()
        self.topk = 0  # nothing is listed before a round begins
        model = self.draft_runner.model
        config = model.config.to_dict()
        block = Block.of(config, int(get_spec().speculative_num_draft_tokens) - 1)
        after = self._logits_after if kind_of(config) == MARKOV else None
        self.levels = HeadLevels(block=block, in_draft=True, after=after)
        self._is_causal = all(layer.self_attn.attn.attn_type == AttentionType.DECODER for layer in model.layers)
        if self.draft_runner.device == "cpu":
            for layer in model.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # its kernel is one of a GPU

    def init_cuda_graphs(self) -> None:
        """Without the engine's captured prompts of a head: a block drafter runs no forward over prompts."""
        with self._contexts():
            self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
        self._capture_cuda_graphs()

    @property
    def model_runner(self) -> Any:
        """The drafter's, by the name that the engine reads of its own worker for block drafters."""
        return self.draft_runner

    def relayed(self, info: DFlashDraftInputV2) -> DraftState:
        """The root alone: of its empty fields SGLang does not take the requests that have ended."""
        return DraftState(empty_state(len(info.bonus_tokens), info.bonus_tokens.device), info.bonus_tokens.long())

    def carried(self, state: DraftState, new_lens: Tensor) -> DFlashDraftInputV2:
        """What the engine carries to the next round of requests with these lengths."""
        return make_draft_input_v2(bonus_tokens=state.roots, new_seq_lens=new_lens)

    def _draft_extend_for_prefill(
        self, batch: Any, target_hidden_states: Tensor, next_token_ids: Tensor, *args: Any, **kwargs: Any
    ) -> DFlashDraftInputV2:
        """Keep keys and values of the tokens of a prefill; target_hidden_states [N, F]: the target's states of them."""
        starts = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        positions = torch.cat([torch.arange(first, first + count) for first, count in starts])
        device = target_hidden_states.device
        slots = batch.out_cache_loc[: len(positions)]
        self._store(target_hidden_states[: len(positions)], positions.to(device, non_blocking=True), slots)
        return make_draft_input_v2(bonus_tokens=next_token_ids, new_seq_lens=batch.seq_lens)

    def extend(self, batch: RoundBatch, accepted: Accepted, path: AcceptedPath, hidden: Tensor) -> DraftState:
        """Keep keys and values of the accepted tokens; hidden [b * E, F] are the target's states of the accepted paths.

        Those of places after a path's length go where the next round's block is written first.
        """
        b, longest = accepted.tokens.shape
        self._store(hidden, path.positions.view(-1), batch.window(0, longest).view(-1))
        return DraftState(empty_state(b, hidden.device), path.roots)

    def _levels(self, batch: RoundBatch, state: DraftState, top_m: int) -> LevelSource | TopM:
        tokens, positions, seen = BlockRows.of(block_of(self.levels), state.roots, batch.prefix_lens, self._is_causal)
        b, rows = tokens.shape
        tokens = tokens.view(-1).long()
        output = self._forward(
            batch,
            mode=ForwardMode.TARGET_VERIFY,
            hidden=CaptureHiddenMode.NULL,
            tokens=tokens,
            positions=positions.view(-1),
            slots=batch.window(0, rows).view(-1),
            info=TreeDraftInput(
                num_tokens_per_req=rows,
                num_tokens_for_logprob_per_req=rows,
                tree_rows=batch.tree_rows(seen, rows),
                slot_table=batch.start.table,
            ),
            embeddings=self._embedding(tokens) * self._embedding_scale,
        )
        states = output.hidden_states.view(b, rows, -1)
        found = block_state(self.levels, states, state.roots, batch.shape.steps, top_m, self._logits)
        return found.top if self.levels.after is None else MarkovLevels(found, top_m, self.levels.after)

    def _logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._logits_processor._compute_lm_head(states, self._output)
        return logits[:, : self._vocabulary].float()

    def _logits_after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """`LogitsAfter`, by the Markov head of SGLang's class."""
        head = self.draft_runner.model.markov_head
        bias, _ = head.step_bias(tokens.reshape(-1), hidden_states=None, state=None)
        bias = bias[:, : self._vocabulary].float()
        return self._logits(states)[:, None] + bias.view(*tokens.shape, -1)

    @torch.no_grad()
    def _store(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write keys and values of r tokens, made of the target's states [r, F]; positions and slots [r] int64."""
        model, pool = self.draft_runner.model, self.draft_runner.token_to_kv_pool
        context = model.project_target_hidden(features)
        for layer in model.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            shape = len(k), attention.num_kv_heads, attention.head_dim
            write_kv(LayerCache.of(attention.attn, pool), slots, k.reshape(shape), v.reshape(shape))


def empty_state(b: int, device: torch.device) -> HeadState:
    """The state of a head that lists nothing before a round begins."""
    none = torch.empty(b, 0, dtype=torch.float32, device=device)
    return HeadState(TopM(none, none.long()), none.half())
