"""Verifies the drafted trees of a batch: the walk, and the move of the accepted keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.numbers import fresh_keys, verify_numbers
from eagle_plugin.engines.vllm.attention import cache_rows
from eagle_plugin.engines.vllm.step import Step, padding_trees
from eagle_plugin.kernels.kv import compact_kv
from eagle_plugin.kernels.sampling import Proposals, SamplingParams, verify_tree

GREEDY_BELOW = 1e-5  # vLLM's `_SAMPLING_EPS`: cooler requests are greedy


def sampling_params(
    metadata: Any, min_ps: Tensor | None, b: int, vocabulary: int, device: torch.device
) -> SamplingParams:
    """The parameters of a vLLM ``SamplingMetadata`` of b requests; min_ps [b] float32 or None."""

    def given(values: Tensor | None, otherwise: float, dtype: torch.dtype) -> Tensor:
        return torch.full((b,), otherwise, dtype=dtype, device=device) if values is None else values[:b].to(dtype)

    temperatures = given(metadata.temperature, 0.0, torch.float32)
    greedy = temperatures < GREEDY_BELOW
    return SamplingParams(
        temperatures.masked_fill(greedy, 1.0),
        given(metadata.top_k, vocabulary, torch.int32).masked_fill(greedy, 1),
        given(metadata.top_p, 1.0, torch.float32),
        given(min_ps, 0.0, torch.float32),
    )


def random_keys(generators: dict[int, torch.Generator], b: int, device: torch.device) -> Tensor:
    """One key a request [b] int64: its seed, or new random bits."""
    keys = fresh_keys(b, device)
    for i, generator in generators.items():
        keys[i] = (generator.initial_seed() + 2**63) % 2**64 - 2**63
    return keys


class CacheGroup(NamedTuple):
    """The caches of the target's layers in one of vLLM's KV cache groups."""

    layer: str  # one of its layers
    data_ptrs: Tensor  # [n] int64: keys and values of every layer
    row_bytes: Tensor  # [n] int64
    rows: int  # of the smallest cache

    @classmethod
    def of(cls, layer: str, caches: Iterable[Tensor]) -> CacheGroup:
        """The group of these caches, each [blocks, Hkv, block size, 2 * D], one of them the layer's."""
        parts = [part for cache in caches for part in cache_rows(cache)]
        device = parts[0].device
        return cls(
            layer,
            torch.tensor([part.data_ptr() for part in parts], device=device),
            torch.tensor([part.stride(0) * part.element_size() for part in parts], device=device),
            min(len(part) for part in parts),
        )

    def compact(self, step: Step, accepted: Accepted, slot_table: Tensor) -> None:
        """Move the keys and values of the accepted nodes to the positions that they now have."""
        positions = step.prefix_lens[step.trees, None] + torch.arange(step.width, device=slot_table.device)
        window = slot_table[step.trees[:, None], positions].long()
        index, lengths = accepted.index[step.trees].contiguous(), accepted.lengths[step.trees].contiguous()
        compact_kv(self.data_ptrs, self.row_bytes, window, index, lengths, slots=self.rows)


class Verified(NamedTuple):
    """What a verification yields for b requests."""

    accepted: Accepted
    logits_rows: Tensor  # [b, E] int64: logits row of each node of the accepted path


def verify(step: Step, tree: DraftTree, logits: Tensor, params: SamplingParams, keys: Tensor, shape: Shape) -> Verified:
    """Walk the trees [b, W] of a step's requests; logits [b * W, V] float32, row i * W + j after node j of the i-th."""
    max_accept_length = min(shape.max_accept_length, step.width)
    proposals = step.proposals if len(step.trees) == step.b else _spread(step)
    numbers = verify_numbers(keys, step.roots, max_accept_length)
    accepted = verify_tree(tree, logits, params, proposals, numbers, max_accept_length, filters="chained")
    nodes = accepted.index.long().clamp(min=0)
    if step.logits_rows is not None:
        return Verified(accepted, step.logits_rows.gather(1, nodes))
    return Verified(accepted, nodes + torch.arange(0, step.b * step.width, step.width, device=nodes.device)[:, None])


def whole_tree(step: Step) -> DraftTree:
    """The trees of all requests of a step, [b, W]: those without drafts have a root only."""
    if len(step.trees) == step.b:
        return step.tree
    rest = padding_trees(step.b, step.width, step.starts.device)
    return DraftTree(*(all_.index_copy(0, step.trees, some) for all_, some in zip(rest, step.tree, strict=True)))


def roots_only(tree: DraftTree, requests: Tensor) -> DraftTree:
    """The trees [b, W] with nothing but padding behind the roots of these requests."""
    parents, draws = tree.parents.clone(), tree.draws.clone()
    parents[requests] = draws[requests] = -1
    return tree._replace(parents=parents, draws=draws)


def _spread(step: Step) -> Proposals:
    """The proposals of the trees, as those of all requests."""
    tokens, weights = step.proposals
    shape = (step.b, *tokens.shape[1:])
    return Proposals(
        tokens.new_zeros(shape).index_copy(0, step.trees, tokens),
        weights.new_zeros(shape).index_copy(0, step.trees, weights),
    )


def said(accepted: Accepted) -> Tensor:
    """The tokens of a round as vLLM takes them, [b, E] int32, -1 behind the last."""
    places = torch.arange(accepted.tokens.shape[1], device=accepted.tokens.device)
    return torch.where(places < accepted.lengths[:, None], accepted.tokens, -1).int()
