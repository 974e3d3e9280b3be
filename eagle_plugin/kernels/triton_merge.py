"""Merges what tree attention in Triton has of the stretches of a prefix (`triton_attention.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagle_plugin.kernels.triton_tiles import Splits, used_splits

__all__ = ["merge"]


@triton.jit(do_not_specialize=["nodes", "window", "chunk", "even", "least", "longest"])
def _merge(
    part_ptr, lse_ptr, out_ptr, prefix_ptr, nodes, window, chunk, even, least, longest,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads / TOGETHER): the stretches of one row and some heads, weighted by their denominators."""
    row = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefix_ptr + row // nodes).to(tl.int32)
    used = used_splits(prefix, window, chunk, even, least, longest, SPLITS, WINDOWED, CHUNKED)
    if used == 1:
        return
    split = tl.arange(0, SPLITS)
    dv = tl.arange(0, BLOCK_DV)
    for i in range(TOGETHER):
        head = tl.program_id(1) * TOGETHER + i
        at = row * HEADS + head
        lse = tl.load(lse_ptr + at * SPLITS + split, mask=(split < used) & (head < HEADS), other=float("-inf"))
        highest = tl.max(lse, 0)
        weight = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
        part = tl.load(
            part_ptr + (at * SPLITS + split)[:, None] * DIM_V + dv[None, :],
            mask=(weight > 0.0)[:, None] & (dv < DIM_V)[None, :],
            other=0.0,
        )
        total = tl.sum(weight, 0)
        merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        tl.store(out_ptr + at * DIM_V + dv, merged.to(out_ptr.dtype.element_ty), mask=(dv < DIM_V) & (head < HEADS))


def merge(
    part: Tensor,
    lse: Tensor,
    out: Tensor,
    prefix_lens: Tensor,
    nodes: int,
    window: int,
    chunk: int,
    splits: Splits,
    together: int,
) -> None:
    """Write the rows of requests with several stretches into `out` [rows, heads, dim]; the others are there.

    part [rows, heads, splits.most, dim] float32, lse [rows, heads, splits.most] float32, prefix_lens [rows / nodes]
    int64. together: heads of a program. Call it on the device of the tensors.
    """
    rows, heads, dim = out.shape
    _merge[(rows, triton.cdiv(heads, together))](
        part, lse, out, prefix_lens, nodes, window, chunk, *splits[1:],
        HEADS=heads, TOGETHER=together, DIM_V=dim, BLOCK_DV=triton.next_power_of_2(max(dim, 16)), SPLITS=splits.most,
        WINDOWED=window >= 0, CHUNKED=chunk > 0,
    )  # fmt: skip
