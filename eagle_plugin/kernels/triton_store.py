"""Writes new keys and values into a cache of 8-bit floats on a GPU, in Triton: one launch for both.

The bits are made by integer arithmetic, so that rounding is the same on every GPU and in Triton's interpreter, which
loses the carry of a rounded mantissa where it converts by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["store_float8"]

BLOCK = 1024  # numbers of a program
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


@triton.jit
def _bits(x, MANTISSA: tl.constexpr, MOST: tl.constexpr):
    """The bits of x in an 8-bit float of so many bits of mantissa, whose largest number is MOST; x float32."""
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    CUT: tl.constexpr = 23 - MANTISSA
    LOWEST: tl.constexpr = 2.0 ** (1 - BIAS)  # of the numbers that are not subnormal
    size = tl.minimum(tl.abs(x), MOST)
    wide = size.to(tl.int32, bitcast=True)
    even = (wide >> CUT) & 1
    normal = ((wide + (1 << (CUT - 1)) - 1 + even) >> CUT) - ((127 - BIAS) << MANTISSA)
    # Adding 2^23 rounds to the nearest integer, to even between two; it is the low bits of the sum then.
    small = (size * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    rounded = tl.where(size < LOWEST, small, normal)
    return tl.where(x != x, 0x7F, rounded) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _store_part(
    x_ptr, cache_ptr, scale_ptr, head_stride, at,
    SIZE: tl.constexpr, DIM: tl.constexpr, MANTISSA: tl.constexpr, MOST: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if SCALED:
        x = tl.div_rn(x, tl.zeros_like(x) + tl.load(scale_ptr))
    to_ptr = cache_ptr + at // DIM * head_stride + at % DIM
    tl.store(to_ptr, _bits(x, MANTISSA, MOST).to(tl.uint8), mask=at < SIZE)


@triton.jit
def _store(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, loc_ptr, k_scale_ptr, v_scale_ptr, k_row_stride, v_row_stride,
    k_slot_stride, k_head_stride, v_slot_stride, v_head_stride, slots,
    SIZE: tl.constexpr, SIZE_V: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    MANTISSA: tl.constexpr, MOST: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of a row, keys and values)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc_ptr + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (slot >= 0) & (slot < slots):
        if tl.program_id(2) == 0:
            _store_part(
                k_ptr + row * k_row_stride, k_cache_ptr + slot * k_slot_stride, k_scale_ptr, k_head_stride, at,
                SIZE, DIM, MANTISSA, MOST, K_SCALED,
            )  # fmt: skip
        else:
            _store_part(
                v_ptr + row * v_row_stride, v_cache_ptr + slot * v_slot_stride, v_scale_ptr, v_head_stride, at,
                SIZE_V, DIM_V, MANTISSA, MOST, V_SCALED,
            )  # fmt: skip


def store_float8(
    k_cache: Tensor, v_cache: Tensor, loc: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Do what `eagle_plugin.kernels.kv.store_kv` promises of caches of 8-bit floats; shapes are checked there.

    The scales are read by the kernel: a launch may be captured in a CUDA graph.
    """
    rows, size, size_v = len(loc), k_cache[0].numel(), v_cache[0].numel()
    if rows == 0:
        return
    stored = k_cache.dtype
    with torch.cuda.device_of(k_cache):
        _store[(rows, triton.cdiv(max(size, size_v), BLOCK), 2)](
            k, v, k_cache.view(torch.uint8), v_cache.view(torch.uint8), loc, k_scale, v_scale,
            k.stride(0), v.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2], len(k_cache),
            SIZE=size, SIZE_V=size_v, DIM=k_cache.shape[2], DIM_V=v_cache.shape[2],
            MANTISSA=MANTISSA_BITS[stored], MOST=torch.finfo(stored).max,
            K_SCALED=k_scale is not None, V_SCALED=v_scale is not None, BLOCK=BLOCK,
        )  # fmt: skip
