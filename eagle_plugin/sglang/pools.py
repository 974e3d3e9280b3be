"""Finds the pools of a target's keys and values, and copies what a round reads of that of the sliding windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from eagle_plugin.kernels.round_start import RoundStart
from eagle_plugin.runtime.accept import KVCaches
from eagle_plugin.runtime.graphs import StaticMemory


class Pool(NamedTuple):
    """Buffers of layers that share their slots."""

    buffers: Any  # an SGLang ``MHATokenToKVPool``
    slot_of: Tensor | None = None  # int64: its slot of each slot of the request table; None where they are the same

    def slots(self, of_table: Tensor) -> Tensor:
        """Its slots [...] int64 of slots of the request table, any shape and integer type."""
        return of_table.long() if self.slot_of is None else self.slot_of[of_table.long()]

    def caches(self) -> KVCaches:
        """Its keys and values; the engine's own bound of slots counts, slot 0 is padding."""
        buffers = self.buffers
        slots = buffers.size + buffers.page_size
        return KVCaches(buffers.data_ptrs.view(torch.int64), buffers.data_strides, slots)


def pools_of(pool: Any) -> list[Pool]:
    """The parts of an SGLang pool; of a hybrid one the second part is that of the layers with a sliding window."""
    if isinstance(pool, SWAKVPool):
        return [Pool(pool.full_kv_pool), Pool(pool.swa_kv_pool, pool.full_to_swa_index_mapping)]
    return [Pool(pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool)]


def check_pools(pools: Iterable[Pool]) -> None:
    """Raise ValueError for a pool that the kernels cannot read."""
    for cache, _ in pools:
        if not isinstance(cache, MHATokenToKVPool) or cache.use_hnd:
            raise ValueError(
                f"eagle-plugin cannot read a KV cache of type {type(cache).__name__}, it reads MHATokenToKVPool "
                "in token-major layout: start the server with EAGLE_PLUGIN=0"
            )


def sliding_layers(pool: Any) -> list[int]:
    """The layers whose keys are in the second part of `pools_of`."""
    return (
        [layer for layer, (_, slides) in pool.layers_mapping.items() if slides] if isinstance(pool, SWAKVPool) else []
    )


def windows_of(model: Any) -> list[int]:
    """How many keys before a row its layers with a sliding window see, of a model of SGLang."""
    layers = [layer for layer in model.modules() if isinstance(layer, RadixAttention)]
    return [layer.sliding_window_size for layer in layers if layer.sliding_window_size >= 0]


def chunk_of(runner: Any) -> int:
    """The tokens of an attention chunk of an SGLang ``ModelRunner``'s target; 0 where no layer has chunks.

    Layers with chunks (Llama 4) are those whose ``use_irope`` is set, as in the engine's own backends.
    """
    layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
    return runner.attention_chunk_size or 0 if any(layer.use_irope for layer in layers) else 0


class SlidingRows(NamedTuple):
    """The keys of a padded batch of B that layers with a sliding window or with chunks can see, in their own pool.

    Positions count from the first of these keys on: what a row sees depends on differences of positions alone, and on
    where chunks begin. So the first key is that of a chunk, where there are chunks.
    """

    prefix_lens: Tensor  # [B] int64: how many of them come before the round's
    table: Tensor  # [B, C] int32: slot of each position
    slots: Tensor  # [B, reach] int64: where the round's own keys go, from L on


class SlidingReader:
    """Reads what a round needs of the pool of the sliding windows, into memory that keeps its address.

    The engine gives the slots of keys that no window reaches any more to others: only the last ones are read.
    """

    def __init__(self, pool: Pool, window: int, reach: int, most: int, columns: int, chunk: int = 0) -> None:
        """window: keys before a row that it sees, of the layer with the longest one; chunk: as of `chunk_of`.

        Others as of `BatchReader`.
        """
        device = pool.buffers.device
        self._pool, self._window, self._chunk, self._last = pool, window, chunk, columns - 1
        self._memory = memory = StaticMemory(device)
        self._count = window + chunk + reach
        self._places = torch.arange(self._count, device=device)
        memory.allocate("prefix_lens", most, torch.int64)
        memory.allocate("table", most * self._count, torch.int32)
        memory.allocate("slots", most * reach, torch.int64)

    def read(self, start: RoundStart) -> SlidingRows:
        """After the round's own copy was made: the engine may change its table and its slots then."""
        padded_b, reach = start.slots.shape
        view = self._memory.view
        table, slots = view("table", padded_b, self._count), view("slots", padded_b, reach)
        rows = SlidingRows(view("prefix_lens", padded_b), table, slots)
        first = (start.prefix_lens - self._window).clamp(min=0)
        if self._chunk:
            first = first - first % self._chunk
        rows.prefix_lens.copy_(start.prefix_lens - first)
        places = (first[:, None] + self._places).clamp(max=self._last)
        rows.table.copy_(self._pool.slots(start.table.gather(1, places)))
        rows.slots.copy_(self._pool.slots(start.slots))
        return rows
