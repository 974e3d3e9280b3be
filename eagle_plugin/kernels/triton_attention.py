"""Tree attention on a GPU, in Triton.

One program takes one request, one key head and one stretch of the prefix. All query rows that share that key head
(nodes x query heads of its group) sit in one tile, so a stretch of keys is read from memory once, whatever the size of
the tree (a tile has at most 128 rows: a larger tree reads its keys once per tile, mostly from the L2 cache). The prefix
is visible to every row and needs no mask but that of a row's first visible position; the tail, at most 64 keys, is
masked by the ancestor bitmasks in the program of the last stretch.

Long contexts are split over programs and merged by a second kernel. The grid comes from shapes alone. Each request uses
as many of its programs as its length on the device asks for (`triton_tiles.used_splits`), and the others return at
once: a launch can be captured in a CUDA graph and replayed with other lengths, and one long request among short ones is
not left to a single program. Every load of a key or value is one slot's contiguous `head_dim` elements: full sectors
for any page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_plugin.kernels.triton_merge import merge
from eagle_plugin.kernels.triton_tiles import Layer, Splits, device_of, plan_for, used_splits

__all__ = ["tree_attention"]

LOG2E = tl.constexpr(1.4426950408889634)  # softmax uses powers of two: a GPU has an instruction for exp2, not for exp


@triton.jit
def _popcount(x):
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def _add_keys(
    q, acc, highest, total,
    k_head_ptr, v_head_ptr, k_slot_stride, v_slot_stride, slots, seen, visible, inner, outer,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAPPED: tl.constexpr, UPCAST: tl.constexpr, DTYPE: tl.constexpr, ALL_SEEN: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the keys in `slots`; those outside `seen` are not read (they may be NaN).

    DTYPE: of the queries, which holds all numbers of an 8-bit cache exactly.

    ALL_SEEN, ALL_VISIBLE: `seen`, `visible` are true everywhere and not looked at.
    """
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_ptr = k_head_ptr + slots[None, :] * k_slot_stride + d[:, None]
    v_ptr = v_head_ptr + slots[:, None] * v_slot_stride + dv[None, :]
    if ALL_SEEN and DIM == BLOCK_D:
        k = tl.load(k_ptr)
    else:
        k = tl.load(k_ptr, mask=seen[None, :] & (d < DIM)[:, None], other=0.0)
    if ALL_SEEN and DIM_V == BLOCK_DV:
        v = tl.load(v_ptr)
    else:
        v = tl.load(v_ptr, mask=seen[:, None] & (dv < DIM_V)[None, :], other=0.0)
    k, v = k.to(DTYPE), v.to(DTYPE)
    if UPCAST:
        k = k.to(tl.float32)
    logits = tl.dot(q, k, input_precision="ieee") * inner
    if CAPPED:
        logits = outer * (2.0 * tl.sigmoid(logits) - 1.0)  # cap * tanh(x / cap), in units of log2
    if not ALL_VISIBLE:
        logits = tl.where(visible, logits, float("-inf"))
    new = tl.maximum(highest, tl.max(logits, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen so far: all weights are zero, not NaN
    weights = tl.exp2(logits - base[:, None])
    fade = tl.exp2(highest - base)
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(DTYPE)
    if UPCAST:
        v = v.to(tl.float32)
        weights = weights.to(tl.float32)
    acc = tl.dot(weights, v, acc * fade[:, None], input_precision="ieee")
    return acc, new, total


@triton.jit(do_not_specialize=["table_stride", "nodes", "tail", "window", "chunk", "even", "least", "longest"])
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, prefix_ptr, ancestors_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    part_ptr, lse_ptr, q_row_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride,
    table_stride, nodes, tail, window, chunk, even, least, longest, inner, outer,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SINKS: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (splits, key heads x row tiles, requests). SPLIT: what a request's stretches give goes to `part`, float32
    [rows, heads, splits, DIM_V], beside the base-2 logarithms of the denominators, `lse` [rows, heads, splits]; of a
    request with one stretch the result goes to `out`, as without SPLIT."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    prefix = tl.load(prefix_ptr + tl.program_id(2)).to(tl.int32)
    used = 1
    if SPLIT:
        used = used_splits(prefix, window, chunk, even, least, longest, splits, WINDOWED, CHUNKED)
        if split >= used:
            return
    kv_head = tl.program_id(1) % (HEADS // GROUP)
    tile = tl.program_id(1) // (HEADS // GROUP)
    request = tl.program_id(2)
    last = split == used - 1

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = node < nodes
    query = (request * nodes + node).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + query[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :],
        mask=valid[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    if UPCAST:
        q = q.to(tl.float32)
    if K_SCALED:
        inner = inner * tl.load(k_scale_ptr)
    bits = tl.load(ancestors_ptr + query, mask=valid, other=0)
    table = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
    k_head_ptr = k_ptr + kv_head * k_head_stride
    v_head_ptr = v_ptr + kv_head * v_head_stride

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # a sink is a logit without a value; the last stretch counts it
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0) * LOG2E
        highest = tl.where(last, sink, highest)
        total = tl.where(last, 1.0, total)

    low = 0
    first = tl.zeros([BLOCK_M], tl.int32)  # the first position that a row sees
    if WINDOWED or CHUNKED:
        position = prefix + _popcount(bits) - 1
        if WINDOWED:
            first = position - window
        if CHUNKED:
            first = tl.maximum(first, position // chunk * chunk)
        low = tl.maximum(tl.min(tl.where(valid, first, prefix), 0), 0)
        for hidden in tl.range(prefix, tl.max(first, 0), num_stages=1):  # the k-th set bit is at position prefix + k
            bits = tl.where(first > hidden, bits & (bits - 1), bits)
    stretch = tl.cdiv(tl.cdiv(tl.maximum(prefix - low, 0), used), BLOCK_N) * BLOCK_N
    begin = low + split * stretch
    end = tl.minimum(begin + stretch, prefix)
    whole = begin  # up to here, blocks of keys without a mask; in float32 the registers are needed for the tile
    if q_ptr.dtype.element_ty != tl.float32:
        whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, whole, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            slots = tl.load(table + key).to(tl.int64)
            seen = key < end
            visible = seen[None, :]
            if WINDOWED or CHUNKED:
                visible = key[None, :] >= first[:, None]
            acc, highest, total = _add_keys(
                q, acc, highest, total,
                k_head_ptr, v_head_ptr, k_slot_stride, v_slot_stride, slots, seen, visible, inner, outer,
                DIM, DIM_V, BLOCK_D, BLOCK_DV, CAPPED, UPCAST, DTYPE, True, not (WINDOWED or CHUNKED),
            )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < end
        visible = seen[None, :]
        if WINDOWED or CHUNKED:
            visible = visible & (key[None, :] >= first[:, None])
        slots = tl.load(table + key, mask=seen, other=0).to(tl.int64)
        acc, highest, total = _add_keys(
            q, acc, highest, total,
            k_head_ptr, v_head_ptr, k_slot_stride, v_slot_stride, slots, seen, visible, inner, outer,
            DIM, DIM_V, BLOCK_D, BLOCK_DV, CAPPED, UPCAST, DTYPE, False, False,
        )  # fmt: skip

    for start in tl.range(tl.where(last, 0, tail), tail, BLOCK_N, num_stages=1):
        key = start + tl.arange(0, BLOCK_N)
        bit = (key & 63).to(tl.int64)  # a step may have more keys than a bitmask has bits: shifts by 64 are undefined
        visible = (((bits[:, None] >> bit[None, :]) & 1) != 0) & (key < tail)[None, :]
        seen = tl.max(visible.to(tl.int32), 0) != 0
        slots = tl.load(table + prefix + key, mask=seen, other=0).to(tl.int64)
        acc, highest, total = _add_keys(
            q, acc, highest, total,
            k_head_ptr, v_head_ptr, k_slot_stride, v_slot_stride, slots, seen, visible, inner, outer,
            DIM, DIM_V, BLOCK_D, BLOCK_DV, CAPPED, UPCAST, DTYPE, False, False,
        )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]  # a row that sees no key is zero
    if V_SCALED:
        acc = acc * tl.load(v_scale_ptr)
    at = query * HEADS + head
    dv = tl.arange(0, BLOCK_DV)
    stored = valid[:, None] & (dv < DIM_V)[None, :]
    if SPLIT:
        part = at * splits + split
        lse = highest + tl.log2(total)  # -inf where the row sees no key of this stretch
        if used > 1:
            tl.store(lse_ptr + part, lse, mask=valid)
            tl.store(part_ptr + part[:, None] * DIM_V + dv[None, :], acc, mask=stored)
        else:
            tl.store(out_ptr + at[:, None] * DIM_V + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        tl.store(out_ptr + at[:, None] * DIM_V + dv[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    ancestors: Tensor,
    out: Tensor,
    *,
    tail: int,
    scale: float,
    logit_cap: float = 0.0,
    window: int = -1,
    chunk: int = 0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    most_keys: int | None = None,
    splits: Splits | None = None,
) -> None:
    """Write into `out` what `eagle_plugin.kernels.attention.tree_attention` promises; shapes are checked there.

    The caches may have any strides but for a contiguous last axis. The contents of the integer tensors are trusted:
    checking them would make the host wait for the device. `splits` overrides how prefixes are split.
    ValueError names a tensor with the wrong strides.
    """
    b, nodes = ancestors.shape
    _, heads, dim = q.shape
    kv_heads, dim_v = v_cache.shape[1:]
    for name, tensor in {"q": q, "k_cache": k_cache, "v_cache": v_cache, "slot_table": slot_table}.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has gaps inside its rows, wanted contiguous rows: call .contiguous()")
    whole = {"rows": rows, "prefix_lens": prefix_lens, "ancestors": ancestors, "sinks": sinks, "out": out}
    for name, dense in whole.items():
        if dense is not None and not dense.is_contiguous():
            raise ValueError(f"{name} has gaps between its rows, wanted a contiguous tensor: call .contiguous()")
    if b * nodes == 0:
        return
    layer = Layer(heads, kv_heads, max(dim, dim_v), dim_v, q.element_size(), window, chunk, logit_cap > 0)
    plan = plan_for(layer, b, nodes, slot_table.shape[1] if most_keys is None else most_keys, device_of(q))
    tile, splits = plan.tile, plan.splits if splits is None else splits
    part: Tensor | None = None
    lse: Tensor | None = None
    if splits.most > 1:
        part = torch.empty(*out.shape[:2], splits.most, dim_v, dtype=torch.float32, device=out.device)
        lse = torch.empty(*out.shape[:2], splits.most, dtype=torch.float32, device=out.device)
    block_dv = triton.next_power_of_2(max(dim_v, 16))
    with torch.cuda.device_of(q):
        _attend[(splits.most, plan.programs, b)](
            q, k_cache, v_cache, slot_table, rows, prefix_lens, ancestors, sinks, k_scale, v_scale, out, part, lse,
            *q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], slot_table.stride(0),
            nodes, tail, window, chunk, *splits[1:],
            2 * scale / logit_cap if logit_cap > 0 else scale * LOG2E.value, logit_cap * LOG2E.value,
            GROUP=heads // kv_heads, HEADS=heads, DIM=dim, DIM_V=dim_v,
            BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=triton.next_power_of_2(max(dim, 16)), BLOCK_DV=block_dv,
            SPLIT=splits.most > 1, CAPPED=logit_cap > 0, WINDOWED=window >= 0, CHUNKED=chunk > 0,
            SINKS=sinks is not None, K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
            UPCAST=not q.is_cuda,  # only Triton's interpreter takes CPU tensors; its dot is wrong for bfloat16
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits.most > 1:
            assert part is not None and lse is not None
            merge(part, lse, out, prefix_lens, nodes, window, chunk, splits, plan.together)
