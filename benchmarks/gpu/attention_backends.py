"""Tree attention by other libraries, for comparison: FlashInfer's masked prefill, and FlashAttention 3 in two calls.

Each function takes a case as `kernels.py` makes it and returns a call without arguments, planned ahead of a capture, or
None where the library is not installed. The cache has pages of one slot. `choices` makes of the measured rows the table
that a choice of a backend can read.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


def flashinfer_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, ancestors: Tensor, heads: int, kv_heads: int
) -> Call | None:
    """Its paged prefill with a custom mask, as SGLang verifies a tree."""
    try:
        import flashinfer
    except ImportError:
        return None
    (b, keys), nodes = table.shape, ancestors.shape[1]
    shifts = torch.arange(nodes, device="cuda")
    seen = torch.ones(b, nodes, keys, dtype=torch.bool, device="cuda")
    seen[:, :, keys - nodes :] = (ancestors[:, :, None] >> shifts) & 1 == 1
    steps = torch.arange(b + 1, dtype=torch.int32, device="cuda")
    workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    last_page = torch.ones(b, dtype=torch.int32, device="cuda")
    layout = (steps * nodes, steps * keys, table.flatten(), last_page, heads, kv_heads, q.shape[2], 1)
    wrapper.plan(*layout, custom_mask=seen.flatten(), q_data_type=q.dtype, kv_data_type=k.dtype)
    return functools.partial(wrapper.run, q, (k[:, None], v[:, None]))


def flash_attention_3() -> Callable[..., Any] | None:
    """`flash_attn_with_kvcache` of version 3: SGLang's, that of the library itself, or vLLM's."""
    for place in ("sgl_kernel.flash_attn", "flash_attn_interface"):
        try:
            found: Callable[..., Any] = importlib.import_module(place).flash_attn_with_kvcache
            return found
        except (ImportError, AttributeError):
            continue
    return _vllms()


def _vllms() -> Callable[..., Any] | None:
    """vLLM's build of it, with the arguments of `flash_attn_with_kvcache` that `flash_attention` gives."""
    try:
        vllms = importlib.import_module("vllm.vllm_flash_attn")
        if not vllms.FA3_AVAILABLE:
            return None
    except (ImportError, AttributeError, OSError):
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        table, lengths = given.pop("page_table"), given.pop("cache_seqlens")
        given |= {"block_table": table, "seqused_k": lengths, "max_seqlen_k": table.shape[1], "fa_version": 3}
        return vllms.flash_attn_varlen_func(q, k, v, **given)

    return attend


def flash_attention(
    attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, table: Tensor, ancestors: Tensor
) -> Call:
    """FlashAttention 3, which has no mask: all rows over the prefix, each row over its own ancestors, and a merge.

    SGLang verifies a tree in this way. `attend` is `flash_attn_with_kvcache`. The slots of the ancestors are found
    here, ahead of the capture.
    """
    (b, keys), nodes = table.shape, ancestors.shape[1]
    like: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    seen = (ancestors[:, :, None] >> torch.arange(nodes, device=q.device)) & 1 == 1
    tail = table[:, None, keys - nodes :].expand(b, nodes, nodes)
    order = (~seen).to(torch.int8).argsort(dim=2, stable=True)  # the slots that a row sees come first
    own, lengths = tail.gather(2, order).flatten(0, 1).contiguous(), seen.sum(2).flatten().int()
    scale, pages = 1 / math.sqrt(q.shape[2]), (k[:, None], v[:, None])
    rest: dict[str, Any] = {"softmax_scale": scale, "causal": False, "return_softmax_lse": True}
    prefix = {"page_table": table, "cache_seqlens": torch.full((b,), keys - nodes, **like), "max_seqlen_q": nodes}
    prefix |= {"cu_seqlens_q": torch.arange(b + 1, **like) * nodes}
    single = {"page_table": own, "cache_seqlens": lengths, "max_seqlen_q": 1}
    single |= {"cu_seqlens_q": torch.arange(b * nodes + 1, **like)}

    def call() -> Tensor:
        parts = [attend(q, *pages, **which, **rest)[:2] for which in (prefix, single)]
        (before, lse_before), (tree, lse_tree) = parts
        share = torch.sigmoid(lse_tree - lse_before).T[:, :, None]  # of the tree in a row's weights
        return torch.lerp(before.float(), tree.float(), share).to(q.dtype)

    return call


def choices(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each measured case of tree attention the fastest library and how much longer ours takes."""
    found = []
    for row in rows:
        if row["kernel"] == "tree_attention":
            times = row["us"]
            fastest = min(times, key=times.__getitem__)
            found.append(row["shape"] | {"fastest": fastest, "ours_over_fastest": times["ours"] / times[fastest]})
    return found
