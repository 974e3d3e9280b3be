"""Forwards of one layer of vLLM with prompts, plain requests and trees over a random cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from float8_bits import random_bits
from torch import Tensor

from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.vllm.attention import ExtendRows, Rows, TreeAttentionImpl, TreeMetadata
from eagle_plugin.vllm.cache_layout import cache_rows, slot_table

KV_HEADS, HEADS, DIM, WIDTH, TOKENS = 2, 6, 32, 4, 320
K_SCALE, V_SCALE = 0.004, 0.009  # with which the largest number of float8_e4m3fn is about 2 and 4


class Forward(NamedTuple):
    """One forward of a layer over a random cache."""

    cache: Tensor
    metadata: TreeMetadata
    query: Tensor

    def by(self, layer: TreeAttentionImpl, chunk: int = 0) -> Tensor:
        float8, slots = self.cache.dtype == torch.uint8, self.metadata.slots
        rows = cache_rows(self.cache.view(torch.float8_e4m3fn) if float8 else self.cache)
        out = torch.full_like(self.query, torch.nan)
        by = (K_SCALE, V_SCALE) if float8 else (1.0, 1.0)
        own = [(cache[slots].float() * scale).to(self.query.dtype) for cache, scale in zip(rows, by, strict=True)]
        scales = {f"_{name}_scale": torch.tensor(scale) for name, scale in zip("kv", by, strict=True)}
        of_vllm = SimpleNamespace(attention_chunk_size=chunk, **scales)
        return layer.forward(of_vllm, self.query, *own, self.cache, self.metadata, out)


def forward(
    requests: list[tuple[int, int, bool]],
    size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_heads: int = KV_HEADS,
    *,
    float8: bool = False,
) -> Forward:
    """requests: tokens before this forward, its rows, and whether those are the nodes of a tree; float8: the cache is
    one of float8_e4m3fn with scales."""
    torch.manual_seed(3)
    b, each = len(requests), TOKENS // size
    cache = torch.randn(b * each, size, kv_heads, 2 * DIM).to(dtype).permute(0, 2, 1, 3)
    if float8:
        bits = random_bits(
            torch.Generator().manual_seed(3), b * each, size, kv_heads, 2 * DIM, dtype=torch.float8_e4m3fn
        )
        cache = bits.view(torch.uint8).permute(0, 2, 1, 3)
    table = slot_table(torch.randperm(b * each).view(b, each).int(), size, TOKENS)
    before, lens = (torch.tensor([request[i] for request in requests]) for i in (0, 1))
    starts = lens.cumsum(0) - lens
    trees = torch.tensor([i for i, request in enumerate(requests) if request[2]], dtype=torch.int64)
    others = torch.tensor([i for i, request in enumerate(requests) if not request[2]], dtype=torch.int64)
    extend = ExtendRows(others, (before + lens)[others], lens[others], starts[others])
    tree = query = None
    if len(trees):
        ancestors = chain_ancestors(WIDTH, cache.device)
        ancestors[2] = 1 | 4  # a second child of the root
        tree = TreeRows(trees, before[trees], ancestors.repeat(len(trees), 1), WIDTH)
        query = (starts[trees, None] + torch.arange(WIDTH)).view(-1)
    rows = Rows(extend if len(others) else None, tree, query, lens[others].tolist())
    slots = torch.cat([table[i, n : n + new] for i, (n, new, _) in enumerate(requests)]).long()
    return Forward(cache, TreeMetadata(rows, table, slots), torch.randn(len(slots), HEADS, DIM).to(dtype))


FORWARDS = {
    "one prompt": [(0, 200, False)],
    "parts of prompts": [(0, 65, False), (90, 130, False), (17, 70, False)],
    "beside trees and plain requests": [
        (3, 1, False),
        (40, 100, False),
        (9, 4, True),
        (21, 12, False),
        (100, 66, False),
    ],
}
