"""Attention over the paged cache of keys and values: C++ on the CPU, Triton for trees on a GPU, else torch.

The key at position p of request i lives in slot slot_table[rows[i], p] of the caches, which are read in place. All
query heads that share a key head are computed together; logits and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.kernels import attention_torch as oracle
from eagle_plugin.kernels.checks import check, check_all, name_of
from eagle_plugin.kernels.float8 import FLOAT8
from eagle_plugin.kernels.loader import function, triton_module

__all__ = ["extend_attention", "tree_attention"]

NATIVE_DIMS = range(16, 577, 16)  # up to the latent rows of DeepSeek
NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_CHECKED = 256
# Shapes and dtypes of calls without a native kernel that were right: every layer of a forward passes the same ones.
_checked: set[tuple[Any, ...]] = set()


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    ancestors: Tensor,
    *,
    tail: int,
    scale: float,
    logit_cap: float = 0.0,
    window: int = -1,
    chunk: int = 0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    most_keys: int | None = None,
) -> Tensor:
    """Attend from R tree nodes of each of b requests to the prefix and to the nodes' own ancestors.

    q [b*R, Hq, D], k_cache [slots, Hkv, D] and v_cache [slots, Hkv, Dv] of one dtype (bfloat16, float16 or float32);
    the caches may have any strides but for a contiguous last axis. slot_table [P, S] int32, rows [b] int64, prefix_lens
    [b] int64, ancestors [b, R] int64 (64-bit bitmasks) -> [b*R, Hq, Dv].
    The prefix keys are at positions 0 .. prefix - 1 and visible to every row, tail key t where bit t of the row's
    bitmask is set. Bits are numbered so that parents come before children: the k-th set bit (k from 0) is a node at
    position prefix + k, the last one is the row itself. Plain decode is R = 1, tail = 1, bitmask = 1.

    A row at position p sees no key before its first visible position, whether that lies in the prefix or in the tree.
    With window >= 0 it is at least p - window (sliding windows), with chunk > 0 at least p - p % chunk (the chunks of
    Llama 4: positions are divided into chunks of that many tokens, and a row sees its own chunk). Both are scalars of a
    layer: each row's first position follows from its bitmask, so no further tensor has to be made per forward.

    The caches may be of 8-bit floats, float8_e4m3fn or float8_e5m2; what they hold is multiplied by k_scale and v_scale
    [1] float32, None: 1. On a GPU the kernel reads the scales.

    most_keys: of the longest prefix that is served. A GPU splits prefixes by it; None: by the width of the slot table,
    so that tables of other widths may need other kernels, which Triton compiles when it meets them.

    Latent attention (MLA) in its absorbed form is this with one key head whose values are the first Dv numbers of each
    key: v_cache = k_cache[..., :Dv]. The rows of either cache may lie apart.

    Sinks [Hq] float32 are extra logits in the denominator. A row that sees no key gives zeros. TypeError and ValueError
    name a wrong input; on a GPU the contents of the integer tensors are not checked, because the host would have to
    wait for them. So a launch can be captured in a CUDA graph.
    """
    _check_chunk(chunk)
    out = _out(q, v_cache, out)
    native = _native("tree_attention", q, v_cache)
    if native is not None:
        lens = (prefix_lens, ancestors, tail)
        native(
            q, k_cache, v_cache, slot_table, rows, *lens, scale, logit_cap, window, chunk, sinks, k_scale, v_scale, out
        )
        return out
    given = (q, k_cache, v_cache, slot_table, rows, prefix_lens, ancestors, sinks, k_scale, v_scale, out)
    key = (tail, *(None if x is None else (x.shape, x.dtype) for x in given))
    if key not in _checked:
        _check(q, k_cache, v_cache, sinks, k_scale, v_scale, out)
        b, R = check_all(("ancestors", ancestors, "int64 b R")).values()
        check_all(
            ("q", q, f"{name_of(q.dtype)} nodes * *"),
            ("prefix_lens", prefix_lens, "int64 b"),
            ("slot_table", slot_table, "int32 * *"),
            ("rows", rows, "int64 b"),
            nodes=b * R,
            b=b,
        )
        if not 0 <= tail <= 64:
            raise ValueError(f"tail is {tail}, wanted 0 to 64: ancestors are one 64-bit bitmask per node")
        if len(_checked) >= MOST_CHECKED:
            _checked.clear()
        _checked.add(key)
    R = ancestors.shape[1]
    launch = _triton() if q.is_cuda and max(q.shape[2], v_cache.shape[2]) <= 256 else None
    if launch is not None:
        args = (q, k_cache, v_cache, slot_table, rows, prefix_lens, ancestors, out)
        limits = {"logit_cap": logit_cap, "window": window, "chunk": chunk, "most_keys": most_keys}
        launch(*args, tail=tail, scale=scale, sinks=sinks, k_scale=k_scale, v_scale=v_scale, **limits)
        return out
    options: dict[str, Any] = {
        "scale": scale,
        "logit_cap": logit_cap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    for i, (row, prefix) in enumerate(zip(rows.tolist(), prefix_lens.tolist(), strict=True)):
        _check_row(slot_table, row, i, prefix + tail if prefix >= 0 else prefix)
        visible = oracle.tree_visible(ancestors[i], prefix, tail, window, chunk)
        slots, own = _slots(slot_table, row, visible, k_cache.shape[0]), slice(i * R, (i + 1) * R)
        out[own] = oracle.attend(q[own], k_cache[slots], v_cache[slots], visible, **options)
    return out


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    starts: Tensor,
    *,
    scale: float,
    causal: bool = True,
    mask: Tensor | None = None,
    logit_cap: float = 0.0,
    window: int = -1,
    chunk: int = 0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from the new tokens of each request to its whole sequence, whose keys and values are all in the cache.

    q [T, Hq, D]; caches, scales, slot_table, rows and sinks as in `tree_attention`; seq_lens, extend_lens and starts
    [b] int64: query j of request i is row starts[i] + j of q at position seq_lens[i] - extend_lens[i] + j.
    -> [T, Hq, Dv].
    mask, a flat bool tensor of e*e elements per request one after another, replaces the causal rule among the e new
    tokens; it must be that of a tree whose parents come before their children: the k-th new token that a row sees is at
    position prefix + k, the last one is the row itself. Window and chunk as in `tree_attention`. For rows of q that
    belong to no request, `out` is not written. TypeError and ValueError name a wrong input.
    """
    _check_chunk(chunk)
    out = _out(q, v_cache, out)
    native = _native("extend_attention", q, v_cache)
    if native is not None:
        lens = (seq_lens, extend_lens, starts)
        limits = (logit_cap, window, chunk, sinks, k_scale, v_scale)
        native(q, k_cache, v_cache, slot_table, rows, *lens, scale, causal, mask, *limits, out)
        return out
    _check(q, k_cache, v_cache, sinks, k_scale, v_scale, out)
    check_all(
        ("seq_lens", seq_lens, "int64 b"),
        ("extend_lens", extend_lens, "int64 b"),
        ("starts", starts, "int64 b"),
        ("slot_table", slot_table, "int32 * *"),
        ("rows", rows, "int64 b"),
    )
    if mask is not None:
        check(mask, "mask", torch.bool, (int((extend_lens * extend_lens).sum()),))
    options: dict[str, Any] = {
        "scale": scale,
        "logit_cap": logit_cap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    at = 0
    requests = zip(rows.tolist(), seq_lens.tolist(), extend_lens.tolist(), starts.tolist(), strict=True)
    for i, (row, n, e, start) in enumerate(requests):
        _check_row(slot_table, row, i, n)
        if not (0 <= e <= n and start >= 0 and start + e <= q.shape[0]):
            raise ValueError(
                f"request {i} has {e} new tokens of {n} from row {start} of q's {q.shape[0]} rows, wanted new tokens "
                "within the sequence and within q: check extend_lens and starts"
            )
        own = None if mask is None else mask[at : at + e * e].view(e, e)
        at += e * e
        visible = oracle.extend_visible(n, e, causal, own, window, q.device, chunk)
        slots, new = _slots(slot_table, row, visible, k_cache.shape[0]), slice(start, start + e)
        out[new] = oracle.attend(q[new], k_cache[slots], v_cache[slots], visible, **options)
    return out


def _out(q: Tensor, v_cache: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        return out
    return torch.empty(*q.shape[:2], *v_cache.shape[2:], dtype=q.dtype, device=q.device)


def _native(name: str, q: Tensor, v_cache: Tensor) -> Callable[..., None] | None:
    """The native kernel for what it supports: CPU, 16 or 32 bits, NATIVE_DIMS; else None."""
    if not q.is_cpu or q.dim() != 3 or v_cache.dim() != 3 or q.dtype not in NATIVE_DTYPES:
        return None
    return function(name) if q.shape[2] in NATIVE_DIMS and v_cache.shape[2] in NATIVE_DIMS else None


def _triton() -> Callable[..., None] | None:
    """The Triton kernel; None where the torch path runs."""
    module = triton_module("triton_attention", "tree attention")
    return None if module is None else module.tree_attention


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    dtype = name_of(q.dtype)
    stored = name_of(k_cache.dtype) if k_cache.dtype in FLOAT8 else dtype
    sizes = check_all(
        ("q", q, f"{dtype} N H D"),
        ("k_cache", k_cache, f"{stored} slots kv D"),
        ("v_cache", v_cache, f"{stored} slots kv Dv"),
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_all(*((name, scale, "float32 1") for name, scale in scales.items() if scale is not None))
    heads, kv_heads = sizes["H"], sizes["kv"]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads over {kv_heads} key heads, wanted a multiple: check the head counts")
    check_all(("out", out, f"{dtype} N H Dv"), *([] if sinks is None else [("sinks", sinks, "float32 H")]), **sizes)


def _check_chunk(chunk: int) -> None:
    if chunk < 0:
        raise ValueError(f"chunk is {chunk}, wanted the tokens of an attention chunk, or 0 for none")


def _check_row(slot_table: Tensor, row: int, request: int, keys: int) -> None:
    if not 0 <= row < slot_table.shape[0]:
        raise ValueError(
            f"rows[{request}] is {row}, wanted 0 to {slot_table.shape[0] - 1}: pass rows of the slot table"
        )
    if not 0 <= keys <= slot_table.shape[1]:
        raise ValueError(
            f"request {request} needs {keys} positions, wanted 0 to {slot_table.shape[1]}: the slot table is too short"
        )


def _slots(slot_table: Tensor, row: int, visible: Tensor, capacity: int) -> Tensor:
    """The slots of a request's keys; a key that no row sees may have any slot, which becomes slot 0."""
    slots = torch.where(visible.any(dim=0), slot_table[row, : visible.shape[1]].long(), 0)
    if slots.is_cpu and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < capacity:
        raise ValueError(
            f"slot_table names a slot outside the cache, wanted 0 to {capacity - 1} for every visible key: "
            "fill the slot table up to the sequence length"
        )
    return slots
