"""Runs a block drafter (DFlash, DSpark) in vLLM: one forward for all levels of a tree.

Its layers attend to keys and values that are made of the target's states of the accepted tokens, without a forward of
the head, and to a block: the root token and masks after it, which all see each other. Mask j is at the position of
the nodes of depth j, and its list is that of all of them, whatever the tokens above them are. DSpark's Markov head adds
to it a bias by the token above, and where it samples from its anchor the rows are one position earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.forward_context import set_forward_context

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.block_config import MARKOV, kind_of
from eagle_plugin.runtime.parallel_levels import Block, BlockRows, HeadLevels, block_of, block_state
from eagle_plugin.runtime.round import HeadState, TreeRows, top_m_of
from eagle_plugin.vllm.attention import Rows, TreeMetadata
from eagle_plugin.vllm.deferred_extend import DeferredRows
from eagle_plugin.vllm.draft_tables import without_whole_tables
from eagle_plugin.vllm.draft_weights import int8_weights
from eagle_plugin.vllm.head_forwards import ExtendBatch, HeadForwards, PathBatch
from eagle_plugin.vllm.masked_rows import HeadRows
from eagle_plugin.vllm.ranks import tokens_of_engines


class BlockForwards(HeadForwards):
    """The forwards of a block drafter; a subclass of this and of vLLM's proposer gives the attributes."""

    _is_causal = False  # whether a row of the block sees only those before it

    def read_head(self, load: Callable[[], Any]) -> Any:
        """The head, by vLLM's own `load`."""
        with without_whole_tables(), int8_weights(self.device.type):
            model = load()
        config = self.speculative_config.draft_model_config.hf_config.to_dict()
        block = Block.of(config, self.speculative_config.num_speculative_tokens)
        after = self._logits_after if kind_of(config) == MARKOV else None
        self.levels, self.block_rows = HeadLevels(block=block, after=after), block.rows
        self._is_causal = all(model.get_draft_attn_causal())
        if self.device.type == "cpu":
            model.model._normalize_context_k = partial(_norm_keys, model.model)
        return model

    def extend(self, batch: ExtendBatch, features: Tensor, slot_table: Tensor, shape: Shape, greedy: bool) -> HeadState:
        """Keep keys and values of a step's tokens, and list the most likely tokens of all levels of `shape`.

        features [N, F] are the target's states of all its query rows.
        """
        self.read_deferred(batch.deferred(features, slot_table))
        return self._list_levels(batch.tokens[batch.last], batch.lengths, slot_table, shape, greedy)

    def extend_paths(self, batch: PathBatch, features: Tensor, shape: Shape, greedy: bool) -> HeadState:
        """`extend` without a number of the host; features [b * E, F] are the target's states of the accepted nodes."""
        positions, b = batch.positions, len(batch.last)
        self._store(features, positions.view(-1), batch.slot_table.gather(1, positions).long().view(-1))
        kept = batch.last - torch.arange(b, device=batch.last.device) * positions.shape[1] + 1  # accepted tokens
        lengths = batch.rows.prefix_lens + kept
        return self._list_levels(batch.tokens.view(-1)[batch.last], lengths, batch.slot_table, shape, greedy)

    def read_deferred(self, deferred: DeferredRows) -> None:
        """Keep keys and values of tokens from which nothing is drafted."""
        _, positions, features, rows, _, slot_table = deferred
        owners = rows.requests.repeat_interleave(rows.lens, output_size=len(positions))
        self._store(features, positions, slot_table[owners, positions].long())

    def masked_rows_per_request(self, shape: Shape) -> int:
        """Rows of a request in the forward of `extend_paths`."""
        return self.block_rows

    def _store(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write keys and values of r tokens into the caches; features [r, F], positions and slots [r] int64.

        Those at the end or after it are of no accepted token: the block's rows overwrite them, or nobody sees them.
        """
        self.model.precompute_and_store_context_kv(self.model.combine_hidden_states(features), positions, slots)

    def _list_levels(self, roots: Tensor, lengths: Tensor, slot_table: Tensor, shape: Shape, greedy: bool) -> HeadState:
        """The lists [b, D, M] of the levels of `shape`, by the whole block after the tokens of each request.

        roots [b]: the last accepted token, which has no keys yet; lengths [b] int64: L; slot_table [b, S].
        """
        tokens, positions, seen = BlockRows.of(block_of(self.levels), roots, lengths, self._is_causal)
        (b, rows), device = tokens.shape, roots.device
        tree = TreeRows(torch.arange(b, device=device), lengths, seen, rows)
        metadata = TreeMetadata(Rows(None, tree), slot_table, slot_table.gather(1, positions).long().view(-1))
        nothing = torch.empty(b * rows, 0, device=device)
        states, _ = self._forward(HeadRows(tokens.view(-1), positions.view(-1), nothing, metadata))
        top_m = top_m_of(shape, greedy)
        return block_state(self.levels, states.view(b, rows, -1), roots, shape.steps, top_m, self._logits)

    def _logits_after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """`LogitsAfter`, by the Markov head of vLLM's class."""
        bias = self.model.markov_bias(self.model.markov_embed(tokens.reshape(-1)))
        return self._logits(states)[:, None] + bias.view(*tokens.shape, -1)

    def _one_forward(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        tokens, positions, _, metadata = rows
        per_layer = dict.fromkeys(self._draft_attn_layer_names, metadata)
        alone = tokens_of_engines(self.vllm_config.parallel_config, len(tokens))
        with set_forward_context(per_layer, self.vllm_config, num_tokens=len(tokens), num_tokens_across_dp=alone):
            states = self.model(input_ids=tokens, positions=positions, inputs_embeds=None)
        return states, states


def _norm_keys(model: Any, keys: Tensor) -> Tensor:
    """Norm the keys [layers, r, Hkv, D] of tokens, each layer's by its own weights.

    vLLM norms them in one call, whose kernel of a CPU takes the first layer's weights for all layers.
    """
    normed = torch.empty_like(keys)
    for out, of_layer, weight in zip(normed, keys, model._k_norm_weights, strict=True):
        _custom_ops.rms_norm(out, of_layer, weight, model._rms_norm_eps)
    return normed
