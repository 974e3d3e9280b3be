"""What a Llama in SGLang needs of `sglang-kernel`, in Triton, for a machine whose torch is not the one of its wheel.

Name this package with the figures of a server that ran with it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__version__ = "0.0.0"


@triton.jit
def _norm(x, residual, weight, out, row_size, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * row_size + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * width + columns, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values * scale * factors, mask=inside)


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, **_: Any) -> Tensor:
    """input [n, H] / its root mean square, times weight [H]."""
    found = torch.empty(input.shape, dtype=input.dtype, device=input.device) if out is None else out
    width = input.shape[-1]
    rows = input if input.stride(-1) == 1 else input.contiguous()
    block = triton.next_power_of_2(width)
    _norm[(len(rows),)](rows, rows, weight, found, rows.stride(0), width, eps, ADD=False, BLOCK=block)
    return found


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> None:
    """residual [n, H] becomes their sum, and input [n, H] its norm; both without gaps."""
    width = input.shape[-1]
    block = triton.next_power_of_2(width)
    _norm[(len(input),)](input, residual, weight, input, input.stride(0), width, eps, ADD=True, BLOCK=block)


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself: a graph then keeps more memory than it needs."""
    return tensor


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not in this stand-in")

    return refuse
