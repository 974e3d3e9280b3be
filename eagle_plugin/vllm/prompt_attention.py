"""Prompts on a GPU by the kernels of vLLM's own backends, in the blocks of our cache; trees and short prompts stay with
our kernel.

vLLM's kernels take keys and values as blocks of tokens with any strides but for the last axis. A layer's cache is read
by all of them as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.v1.kv_cache_interface import KVQuantMode

from eagle_plugin.core.shape import MAX_WIDTH
from eagle_plugin.kernels.float8 import FLOAT8
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.vllm.attention import ExtendRows, TreeAttentionImpl, TreeMetadata, attend_chains
from eagle_plugin.vllm.cache_layout import CacheRows

PAGE = 16  # FlashAttention reads blocks of a multiple of so many tokens
SINKS = (3, 4)  # versions of FlashAttention that have attention sinks, in bfloat16
VERSIONS = (2, *SINKS)
MOST_KEYS = 128  # vLLM's Triton kernel looks up the blocks of so many keys at once, also after the last one


class Prompts(NamedTuple):
    """The p requests of a forward whose rows are too many for one chain, as vLLM's kernels read them."""

    query: Tensor | None  # [n] int64: their query rows, one request after another; None: all rows, in order
    bounds: Tensor  # [p + 1] int32: first of those rows of each request, and their number
    seq_lens: Tensor  # [p] int32: tokens after this forward
    block_table: Tensor  # [p, blocks] int32; the last MOST_KEYS positions are padding
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
    blocks = slot_table[extend.requests[index], ::block_size].div(block_size, rounding_mode="floor")
    blocks = pad(blocks, (0, -(-MOST_KEYS // block_size)))
    seq_lens = extend.seq_lens[index].int()
    return Prompts(query, bounds.int(), seq_lens, blocks, int(counts.max()), slot_table.shape[1])


def paged(cache: CacheRows, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer's cache as blocks of tokens, each a view [blocks, block size, Hkv, D]."""
    keys, values = (x.unflatten(0, (blocks, block_size)) for x in cache)
    return keys, values


class PromptKernel(NamedTuple):
    """A kernel of vLLM for prompts."""

    # query [n, Hq, D] of all prompts, keys, values, prompts, options of our kernels, out or None -> out [n, Hq, D]
    attend: Callable[[Tensor, Tensor, Tensor, Prompts, dict[str, Any], Tensor | None], Tensor]
    page: int  # it reads blocks of a multiple of so many tokens
    chunks: bool = False  # it has chunked attention
    sinks: Sequence[torch.dtype] = ()  # of queries for which it has attention sinks
    float8: bool = False  # it reads caches of 8-bit floats

    def takes(self, query: Tensor, cache: CacheRows, block_size: int, options: dict[str, Any]) -> bool:
        """Whether it has what a layer needs. In float32 none is exact: FlashAttention has no such kernel, and vLLM's
        Triton kernel multiplies in TF32."""
        served = (self.chunks and options["window"] < 0) or not options["chunk"]
        served = served and (options["sinks"] is None or query.dtype in self.sinks)
        served = served and (self.float8 or cache.keys.dtype not in FLOAT8)
        return served and query.dtype != torch.float32 and block_size % self.page == 0


class PromptsImpl(TreeAttentionImpl):
    """Attention of one layer on a GPU, with a kernel of vLLM for prompts where there is one."""

    @staticmethod
    def find_kernel(head_size: int, soft_cap: bool, float8: bool, sinks: bool) -> PromptKernel | None:
        """The kernel for such layers on this GPU; None where there is none, as in this class: all rows are chains."""
        return None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        kind = self.logits_soft_cap > 0, self.float8 is not None, self.sinks is not None
        self.kernel = self.find_kernel(self.head_size, *kind)

    def extend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        cache: CacheRows,
        metadata: TreeMetadata,
        options: dict[str, Any],
        out: Tensor,
    ) -> None:
        """vLLM's kernel for the requests with more rows than a chain, chains for the others."""
        blocks, _, size, _ = kv_cache.shape
        if self.kernel is None or not self.kernel.takes(query, cache, size, options):
            super().extend(query, kv_cache, cache, metadata, options, out)
            return
        assert metadata.rows.extend is not None
        extend, lens, alone = metadata.rows.extend, metadata.rows.extend_lens, metadata.rows.tree is None
        prompts = metadata.planned("prompts", lambda: prompts_of(extend, lens, metadata.slot_table, size, alone))
        attend_chains(query, cache, metadata.chains(MAX_WIDTH), options, out)
        if prompts is None:
            return
        keys, values = paged(cache, blocks, size)
        if prompts.query is None:
            self.kernel.attend(query, keys, values, prompts, options, out)
        else:
            out[prompts.query] = self.kernel.attend(query[prompts.query], keys, values, prompts, options, None)


class FlashPromptsImpl(PromptsImpl):
    """With FlashAttention, in the version that vLLM would take itself; with vLLM's Triton kernel for layers that this
    version does not have.

    It reads 8-bit keys for 8-bit queries alone, which would round more than decoding does here: such caches have the
    Triton kernel too. Version 4, of a Blackwell GPU, compiles a kernel when it first meets a kind of layer, as it does
    without the plugin; the test of the round before the first request has a prompt.
    """

    @staticmethod
    def find_kernel(head_size: int, soft_cap: bool, float8: bool, sinks: bool) -> PromptKernel | None:
        """vLLM's FlashAttention, in the version that it would take for such layers, or its Triton kernel."""
        version = None
        if not float8:
            from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

            version = get_flash_attn_version(head_size=head_size, has_sinks=sinks, requires_softcap=soft_cap)
        if version not in VERSIONS or (sinks and version not in SINKS):
            return TritonPromptsImpl.find_kernel(head_size, soft_cap, float8, sinks)
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        return flash_kernel(functools.partial(flash_attn_varlen_func, fa_version=version), version in SINKS)


class TritonPromptsImpl(PromptsImpl):
    """With vLLM's own Triton kernel."""

    @staticmethod
    def find_kernel(head_size: int, soft_cap: bool, float8: bool, sinks: bool) -> PromptKernel | None:
        """The kernel of vLLM's backend TRITON_ATTN, for all layers."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        return triton_kernel(unified_attention)


def flash_kernel(flash_attention: Callable[..., Tensor], sinks: bool) -> PromptKernel:
    """vLLM's ``flash_attn_varlen_func`` of one version; sinks: whether this version has them."""

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, options: dict[str, Any], out: Tensor | None
    ) -> Tensor:
        given = options["sinks"]
        return flash_attention(
            q=query,
            k=keys,
            v=values,
            max_seqlen_q=prompts.most_rows,
            cu_seqlens_q=prompts.bounds,
            max_seqlen_k=prompts.most_tokens,
            seqused_k=prompts.seq_lens,
            softmax_scale=options["scale"],
            causal=True,
            window_size=[options["window"], 0] if options["window"] >= 0 else None,
            softcap=options["logit_cap"],
            block_table=prompts.block_table,
            s_aux=None if given is None else given.to(query.dtype),  # as the model has them: ours are its float32 copy
            out=out,
        )

    return PromptKernel(attend, PAGE, sinks=(torch.bfloat16,) if sinks else ())


def triton_kernel(unified_attention: Callable[..., None]) -> PromptKernel:
    """vLLM's ``unified_attention``. A chunk is a window of its length that begins where the chunk does."""

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, options: dict[str, Any], out: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(query) if out is None else out
        chunk, shape = options["chunk"], (len(prompts.seq_lens), keys.shape[2])
        k_scale, v_scale = (options.get(name) for name in ("k_scale", "v_scale"))
        before = chunk - 1 if chunk else options["window"]
        unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=prompts.bounds,
            max_seqlen_q=prompts.most_rows,
            seqused_k=prompts.seq_lens,
            max_seqlen_k=prompts.most_tokens,
            softmax_scale=options["scale"],
            causal=True,
            window_size=(before, 0) if before >= 0 else (-1, -1),
            block_table=prompts.block_table,
            softcap=options["logit_cap"],
            q_descale=None,
            k_descale=None if k_scale is None else k_scale.expand(shape),
            v_descale=None if v_scale is None else v_scale.expand(shape),
            sinks=options["sinks"],
            kv_quant_mode=KVQuantMode.NONE if k_scale is None else KVQuantMode.FP8_PER_TENSOR,
            chunk_lookback=0 if chunk else -1,
        )
        return out

    return PromptKernel(attend, page=1, chunks=True, sinks=(torch.float16, torch.bfloat16), float8=True)
