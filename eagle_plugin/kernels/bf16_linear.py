"""A linear layer with bfloat16 weights on a CPU, for the rows of a verification.

Where the CPU multiplies pairs of bfloat16, torch brings the weights of a layer into another order for each call, which
takes longer than to read them. Where it has AVX2 alone, torch multiplies one row after another. Our kernels read the
weights as they are, once for several rows, and need no copy of them. They sum the products of an output in the same
order whatever the number of rows: a row has the same result, to the bit, in every batch that they serve. The sums are
float32, as torch's are, in another order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_plugin.kernels import build, loader

MAX_ROWS = 32  # with more, torch's products of pairs are as fast as ours (benchmarks/kernels.py)
MAX_ROWS_AMX = 8  # with more, torch's tiles are faster
ANY_ROWS = sys.maxsize
_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


class Kernel(NamedTuple):
    """One of our kernels."""

    multiply: Callable[..., Any]  # (x, weight, bias, out)
    max_rows: int  # up to which it is to be used


@functools.cache
def native_kernel() -> Kernel | None:
    """Our kernel for this CPU; None where the CPU or the library has none.

    None with AVX-512 without products of bfloat16 pairs, where ours was not measured against torch's. With AMX it is
    for layers whose weights the engine has not brought into the order of the tiles.
    """
    flags = build.cpu_flags()
    runs_here = loader.function("has_bf16_linear")
    if runs_here is None:
        return None
    if runs_here():
        most = MAX_ROWS_AMX if "amx_tile" in flags else MAX_ROWS
        return Kernel(loader.function("bf16_linear"), most)  # type: ignore[arg-type]
    if flags >= build.AVX2 and not flags >= build.AVX512:
        return Kernel(loader.function("bf16_linear_fma"), ANY_ROWS)  # type: ignore[arg-type]
    return None


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel is to be used for these inputs, [..., K], and weights, [N, K]."""
    kernel = native_kernel()
    if kernel is None or x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return False
    return 0 < x.numel() <= kernel.max_rows * x.shape[-1] and x.is_cpu and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x [..., K] and weight [N, K] bfloat16 -> [..., N] bfloat16.

    torch computes what `serves` does not name.
    """
    return multiply(x, weight, bias) if serves(x, weight) else F.linear(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by our kernel, for what `serves` names."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = x.new_empty(rows.shape[0], weight.shape[0])
    native_kernel().multiply(rows, weight, _NO_BIAS if bias is None else bias, out)  # type: ignore[union-attr]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
