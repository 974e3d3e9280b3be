"""Reads vLLM's KV caches as rows of one token each, and its block tables as rows of these."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec, UniformTypeKVCacheSpecs


class CacheRows(NamedTuple):
    """A layer's cache as rows of one token each: keys and values are views with the same row numbers."""

    keys: Tensor  # [rows, Hkv, D]
    values: Tensor  # [rows, Hkv, Dv]


def token_rows(kv_cache: Tensor) -> Tensor:
    """View a layer's cache [blocks, Hkv, block size, 2 * D] as rows of one token each, [rows, Hkv, 2 * D].

    A row has the number that vLLM gives to its slot. Memory is in that order too (vLLM's layout LBNHC), so that what
    copies blocks or tokens to other servers finds them where vLLM's own backends have them.
    """
    blocks, heads, size, content = kv_cache.shape
    if kv_cache.stride() != (size * heads * content, content, heads * content, 1):
        raise ValueError(
            f"eagle-plugin cannot read a KV cache of shape {list(kv_cache.shape)} and strides "
            f"{list(kv_cache.stride())}, it wants the layout LBNHC: start the server with EAGLE_PLUGIN=0"
        )
    return kv_cache.transpose(1, 2).view(blocks * size, heads, content)


def cache_rows(kv_cache: Tensor) -> CacheRows:
    """The keys and the values of `token_rows`."""
    keys, values = token_rows(kv_cache).chunk(2, dim=-1)
    return CacheRows(keys, values)


def slot_table(block_table: Tensor, block_size: int, positions: int) -> Tensor:
    """The cache row of each of the first `positions` positions, [b, S] int32; block_table [b, blocks] int32.

    Positions after the end of the block table get row 0. Padding has them, because a tree that was cut short at the
    maximal length of its request is as wide as the others of its batch, and so have the last nodes of a deep draft of
    such a request: they share that row, and are worse drafts.
    """
    blocks = min(-(-positions // block_size), block_table.shape[1])
    offsets = torch.arange(block_size, dtype=torch.int32, device=block_table.device)
    first = block_table[:, :blocks].int() * block_size
    table = (first[:, :, None] + offsets).view(len(block_table), -1)
    return table if table.shape[1] >= positions else pad(table, (0, positions - table.shape[1]))


def keeps_all_tokens(kv_cache_spec: Any) -> bool:
    """Whether vLLM keeps the blocks of a group of caches with this ``KVCacheSpec`` until their request ends.

    It takes those before a window, or before a chunk, from a request that runs, and gives them to others.
    """
    of_groups = isinstance(kv_cache_spec, UniformTypeKVCacheSpecs)
    specs = kv_cache_spec.kv_cache_specs.values() if of_groups else [kv_cache_spec]
    return all(isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec) for spec in specs)
