"""Norm, activation and rotary positions of small batches in one C++ call each; None where torch must do it."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_sglang_cpu.native import function

_DTYPES = (torch.float32, torch.bfloat16)
_NONE = torch.empty(0, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Return (x * weight / rms(x), residual), with x = x + residual first where there is a residual; None if unserved.

    x and residual [..., n], weight [n], all float32 or all bfloat16, n a multiple of 16; sums are float32. The returned
    residual is x + residual rounded to their dtype, x itself without one.
    """
    native = function("rms_norm")
    n = x.shape[-1]
    if native is None or not _served(x, n) or weight.dtype is not x.dtype:
        return None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is None:
        native(x.view(-1, n), weight, _NONE, out.view(-1, n), eps)
        return out, x
    if residual.dtype is not x.dtype:
        return None
    total = residual.clone(memory_format=torch.contiguous_format)
    native(x.view(-1, n), weight, total.view(-1, n), out.view(-1, n), eps)
    return out, total


def silu_and_mul(x: Tensor) -> Tensor | None:
    """Return silu(first half) * second half of x [..., 2n], n a multiple of 16; None if unserved."""
    native = function("silu_and_mul")
    n = x.shape[-1] // 2
    if native is None or x.shape[-1] % 2 or not _served(x, n):
        return None
    out = x.new_empty(*x.shape[:-1], n)
    native(x.view(-1, 2 * n), out.view(-1, n))
    return out


def rotary(positions: Tensor, q: Tensor, k: Tensor, cos_sin: Tensor, head_size: int) -> tuple[Tensor, Tensor] | None:
    """Return q and k [N, heads * head_size] with rotary positions, Neox style; None if unserved.

    positions [N] int64, cos_sin [positions, rotary_dim] float32 or bfloat16 (cosines, then sines), rotary_dim a
    multiple of 32.
    """
    native = function("rotary")
    if native is None or q.dtype not in _DTYPES or k.dtype is not q.dtype or not q.is_cpu or q.dim() != 2:
        return None
    if cos_sin.dtype not in _DTYPES or cos_sin.shape[1] % 32:
        return None
    if positions.dtype is not torch.int64 or positions.dim() != 1:
        return None
    rows = q.shape[0]
    turned_q, turned_k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    native(positions, turned_q.view(rows, -1, head_size), turned_k.view(rows, -1, head_size), cos_sin)
    return turned_q, turned_k


def _served(x: Tensor, n: int) -> bool:
    return x.is_cpu and x.dtype in _DTYPES and n % 16 == 0 and x.is_contiguous() and x.numel() > 0
