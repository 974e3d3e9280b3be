"""Moves the keys and values of accepted paths in vLLM's caches, and gives their tokens to the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.accept import KVCaches
from eagle_plugin.vllm.cache_layout import token_rows
from eagle_plugin.vllm.latent_attention import latent_rows


class CacheGroup(NamedTuple):
    """The caches of the target's layers in one of vLLM's KV cache groups."""

    layer: str  # one of its layers
    caches: KVCaches

    @classmethod
    def of(cls, layer: str, caches: Iterable[Tensor]) -> CacheGroup:
        """The group of these caches, one of them the layer's; each as `rows_of` takes it."""
        parts = [rows_of(cache) for cache in caches]
        device = parts[0].device
        data_ptrs = torch.tensor([part.data_ptr() for part in parts], device=device)
        row_bytes = torch.tensor([part.stride(0) * part.element_size() for part in parts], device=device)
        return cls(layer, KVCaches(data_ptrs, row_bytes, min(len(part) for part in parts)))

    def move_accepted(
        self, requests: Tensor, prefix_lens: Tensor, width: int, accepted: Accepted, slot_table: Tensor
    ) -> None:
        """Move the keys and values of the accepted nodes to the positions that they now have.

        requests [t] int64: row in slot_table [b, S] of each tree; prefix_lens [t] int64 and accepted are of the trees,
        which have `width` nodes.
        """
        positions = prefix_lens[:, None] + torch.arange(width, device=slot_table.device)
        self.caches.move_accepted(slot_table[requests[:, None], positions].long(), accepted)


def rows_of(kv_cache: Tensor) -> Tensor:
    """A layer's cache as rows of one token each: one [blocks, Hkv, block size, 2 * D], or a latent one [blocks, block
    size, C]."""
    return latent_rows(kv_cache) if kv_cache.ndim == 3 else token_rows(kv_cache)


def cache_groups(groups: Iterable[Any], layers: Mapping[str, Any], others: Collection[str]) -> list[CacheGroup]:
    """The caches of the target's layers by vLLM's KV cache groups; layers by name, of which `others` are not these."""
    found = []
    for group in groups:
        names = [name for name in group.layer_names if name not in others]
        own = [layers[name].kv_cache for name in names if isinstance(layers[name], AttentionLayerBase)]
        # Layers can share a cache, whose keys are moved once.
        if caches := {cache.data_ptr(): cache for cache in own}:
            found.append(CacheGroup.of(names[0], list(caches.values())))
    return found


def output_tokens(accepted: Accepted) -> Tensor:
    """The tokens of a round as vLLM takes them, [b, E] int32, -1 after the last."""
    places = torch.arange(accepted.tokens.shape[1], device=accepted.tokens.device)
    return torch.where(places < accepted.lengths[:, None], accepted.tokens, -1).int()
