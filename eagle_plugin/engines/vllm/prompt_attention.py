"""Prompts on a GPU by FlashAttention, in the blocks of our cache; trees and short prompts stay with our kernel.

FlashAttention takes keys and values as blocks of tokens with any strides but for the last axis. A layer's cache is read
by both kernels as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.engines.staging import to_device
from eagle_plugin.engines.vllm.attention import (
    CacheRows,
    ExtendRows,
    TreeAttentionImpl,
    TreeMetadata,
    attend_chains,
)

PAGE = 16  # FlashAttention reads blocks of a multiple of so many tokens
VERSIONS = (2, 3)  # 4 compiles for each size when it first meets it, which nobody would have warmed up


class Prompts(NamedTuple):
    """The p requests of a forward whose rows are too many for one chain, as FlashAttention reads them."""

    query: Tensor | None  # [n] int64: their query rows, one request after another; None: all rows, in order
    bounds: Tensor  # [p + 1] int32: first of those rows of each request, and their number
    seq_lens: Tensor  # [p] int32: tokens after this forward
    block_table: Tensor  # [p, blocks] int32
    most_rows: int  # of a request
    most_tokens: int  # an upper bound of seq_lens


def prompts_of(
    extend: ExtendRows, lens: Sequence[int], slot_table: Tensor, block_size: int, alone: bool
) -> Prompts | None:
    """The requests with more rows than a chain has; None if there are none.

    lens: extend.lens, on the host. slot_table [b, S] int32, of blocks of `block_size` tokens. alone: the query rows are
    those of `extend` in its order, and no others.
    """
    chosen = [i for i, n in enumerate(lens) if n > MAX_WIDTH]
    if not chosen:
        return None
    counts = np.array(lens)[chosen]
    n = int(counts.sum())
    index, bounds = to_device([np.array(chosen), np.concatenate([[0], counts.cumsum()])], slot_table.device)
    query = None
    if not alone or len(chosen) < len(lens):
        shifts = extend.starts[index] - bounds[:-1]
        query = torch.arange(n, device=index.device) + shifts.repeat_interleave(extend.lens[index], output_size=n)
    # The first row of block i of a cache is 2 * i * block_size (`cache_rows`).
    blocks = slot_table[extend.requests[index], ::block_size].div(2 * block_size, rounding_mode="floor")
    seq_lens = extend.seq_lens[index].int()
    return Prompts(query, bounds.int(), seq_lens, blocks, int(counts.max()), slot_table.shape[1])


def paged(cache: CacheRows, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer's cache as blocks of tokens, each a view [blocks, block size, Hkv, D]."""
    _, heads, dim = cache.keys.shape
    shape, row = (blocks, block_size, heads, dim), heads * dim
    keys, values = (x.as_strided(shape, (2 * block_size * row, row, dim, 1)) for x in cache)
    return keys, values


class FlashPromptsImpl(TreeAttentionImpl):
    """Attention of one layer on a GPU where vLLM has FlashAttention 2 or 3."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._flash = find_flash_attention(self.head_size, self.logits_soft_cap > 0)

    def extend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        cache: CacheRows,
        metadata: TreeMetadata,
        options: dict[str, Any],
        out: Tensor,
    ) -> None:
        """FlashAttention for the requests with more rows than a chain, chains for the others.

        FlashAttention has no chunked attention and no float32, and takes sinks in version 3 only: there all are chains.
        """
        blocks, _, size, _ = kv_cache.shape
        rows = metadata.rows
        odd = options["chunk"] or options["sinks"] is not None or query.dtype == torch.float32 or size % PAGE
        if self._flash is None or odd:
            super().extend(query, kv_cache, cache, metadata, options, out)
            return
        assert rows.extend is not None
        extend, lens, alone = rows.extend, rows.extend_lens, rows.tree is None
        prompts = metadata.planned("prompts", lambda: prompts_of(extend, lens, metadata.slot_table, size, alone))
        attend_chains(query, cache, metadata.chains(MAX_WIDTH), options, out)
        if prompts is None:
            return
        keys, values = paged(cache, blocks, size)
        window = options["window"]
        found = self._flash(
            q=query if prompts.query is None else query[prompts.query],
            k=keys,
            v=values,
            max_seqlen_q=prompts.most_rows,
            cu_seqlens_q=prompts.bounds,
            max_seqlen_k=prompts.most_tokens,
            seqused_k=prompts.seq_lens,
            softmax_scale=options["scale"],
            causal=True,
            window_size=[window, 0] if window >= 0 else None,
            softcap=options["logit_cap"],
            block_table=prompts.block_table,
            out=out if prompts.query is None else None,
        )
        if prompts.query is not None:
            out[prompts.query] = found


def find_flash_attention(head_size: int, soft_cap: bool) -> Callable[..., Tensor] | None:
    """vLLM's FlashAttention in the version that it would take for such layers itself; None where it is none of ours."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version(head_size=head_size, requires_softcap=soft_cap)
    if version not in VERSIONS:
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    def flash(**arguments: Any) -> Tensor:
        found: Tensor = flash_attn_varlen_func(fa_version=version, **arguments)
        return found

    return flash
