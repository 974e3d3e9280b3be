"""Verifies the drafted trees of a batch: the logits of every node, the walk, the move of accepted keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.ranks import RankAgreement
from eagle_plugin.engines.round import KVCaches, accept, accepted_rows
from eagle_plugin.engines.vllm.attention import cache_rows
from eagle_plugin.engines.vllm.batch import RoundBatch
from eagle_plugin.engines.vllm.linear_attention import LinearLayers
from eagle_plugin.engines.vllm.logits import (
    keeps_logits,
    min_ps,
    minimal_lengths,
    node_rows,
    transform_logits,
)
from eagle_plugin.engines.vllm.logprobs import output_logprobs, wants_logprobs
from eagle_plugin.engines.vllm.sampling import request_keys, sampling_params
from eagle_plugin.engines.vllm.thinking import follow_budgets, plain_requests


class CacheGroup(NamedTuple):
    """The caches of the target's layers in one of vLLM's KV cache groups."""

    layer: str  # one of its layers
    caches: KVCaches

    @classmethod
    def of(cls, layer: str, caches: Iterable[Tensor]) -> CacheGroup:
        """The group of these caches, each [blocks, Hkv, block size, 2 * D], one of them the layer's."""
        parts = [part for cache in caches for part in cache_rows(cache)]
        device = parts[0].device
        data_ptrs = torch.tensor([part.data_ptr() for part in parts], device=device)
        row_bytes = torch.tensor([part.stride(0) * part.element_size() for part in parts], device=device)
        return cls(layer, KVCaches(data_ptrs, row_bytes, min(len(part) for part in parts)))

    def move_accepted(self, batch: RoundBatch, accepted: Accepted, slot_table: Tensor) -> None:
        """Move the keys and values of the accepted nodes to the positions that they now have."""
        positions = batch.prefix_lens[batch.trees, None] + torch.arange(batch.width, device=slot_table.device)
        window = slot_table[batch.trees[:, None], positions].long()
        of_trees = Accepted(*(values[batch.trees].contiguous() for values in accepted))
        self.caches.move_accepted(window, of_trees)


class TreeVerifier:
    """Verification over the target's caches."""

    def __init__(
        self, groups: list[CacheGroup], linear: LinearLayers, sampler: Any, logprobs_mode: str, ranks: RankAgreement
    ) -> None:
        """sampler is vLLM's ``Sampler``, whose functions make the log probabilities that requests ask for."""
        self.groups, self._linear, self._sampler, self._logprobs_mode = groups, linear, sampler, logprobs_mode
        self._ranks = ranks

    def verify(
        self, batch: RoundBatch, logits: Tensor, metadata: Any, states: list[Any], layers: Mapping[str, Any]
    ) -> tuple[SamplerOutput, Accepted]:
        """Verify one tree per request; a request without drafts has a tree of one node.

        logits [n, V] are the target's in vLLM's order of rows; metadata is its ``SamplingMetadata``, states its
        ``CachedRequestState`` of each request, layers the attention metadata of the forward by layer.
        """
        device = logits.device
        follow_budgets(metadata, states)
        minimal, wanted = minimal_lengths(states), wants_logprobs(metadata)
        transforms = minimal or not keeps_logits(metadata)
        if metadata.all_greedy and not (len(batch.trees) or transforms or wanted):
            accepted = self._ranks.agree(plainly(self._sampler.greedy_sample(logits.float())))
            return SamplerOutput(sampled_token_ids=output_tokens(accepted), logprobs_tensors=None), accepted
        drafts = batch.all_drafts()
        if plain := plain_requests(metadata, drafts.shape.max_accept_length):
            sizes = torch.full((batch.b,), batch.width, device=device)
            sizes[plain] = 1
            drafts = drafts.truncate(sizes)
        raw, logits = logits, logits.float()
        if transforms:
            logits = logits.clone() if logits is raw else logits
            rows = node_rows(batch.b, batch.width, batch.logits_rows, len(logits), device)
            logits = transform_logits(metadata, drafts.tree, batch.roots, minimal, rows, logits)
        params = sampling_params(metadata, min_ps(metadata, batch.b), batch.b, logits.shape[1], device)
        keys = None if metadata.all_greedy else request_keys(metadata.generators, batch.b, device)
        accepted = accept(drafts, batch.tree_logits(logits), params, keys, batch.roots, filters="chained")
        accepted = self._ranks.agree(accepted)
        if len(batch.trees):
            for group in self.groups:
                group.move_accepted(batch, accepted, layers[group.layer].slot_table)
            self._linear.commit(layers, accepted)
        logprobs = None
        if wanted:
            path = batch.logits_row_of(accepted_rows(accepted, batch.width)).view(-1)
            logprobs = output_logprobs(
                self._sampler, self._logprobs_mode, metadata, params, raw[path], logits[path], accepted
            )
        return SamplerOutput(sampled_token_ids=output_tokens(accepted), logprobs_tensors=logprobs), accepted


def plainly(tokens: Tensor) -> Accepted:
    """The paths of a step without trees: tokens [b] int64, one of each request."""
    lengths = torch.ones_like(tokens, dtype=torch.int32)
    return Accepted(torch.zeros_like(lengths)[:, None], lengths, tokens[:, None])


def output_tokens(accepted: Accepted) -> Tensor:
    """The tokens of a round as vLLM takes them, [b, E] int32, -1 after the last."""
    places = torch.arange(accepted.tokens.shape[1], device=accepted.tokens.device)
    return torch.where(places < accepted.lengths[:, None], accepted.tokens, -1).int()
