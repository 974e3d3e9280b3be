"""A linear layer with bfloat16 weights on a CPU, for the few rows of a verification.

torch brings the weights of a layer into another order for each call, which takes longer than to read them. Our kernel
reads them as they are, so that eight rows take little longer than one, and needs no copy of them. It sums the products
of an output in the same order whatever the number of rows: a row has the same result, to the bit, in every batch that
the kernel serves. The sums are float32, as torch's are, in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_plugin.kernels import build, loader

MAX_ROWS = 32  # with more, torch is as fast: products take the time, not reading weights (benchmarks/kernels.py)
_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


@functools.cache
def native_kernel() -> Callable[..., Any] | None:
    """Our kernel, ``bf16_linear(x, weight, bias, out)``; None where the CPU or the library does not have it.

    None with AMX too: its engines keep the weights in the order of the tiles.
    """
    runs_here = loader.function("has_bf16_linear")
    has_kernel = runs_here is not None and runs_here() and "amx_tile" not in build.cpu_flags()
    return loader.function("bf16_linear") if has_kernel else None


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel is to be used for these inputs, [..., K], and weights, [N, K]."""
    few = 0 < x.numel() <= MAX_ROWS * x.shape[-1]
    both = x.dtype is torch.bfloat16 and weight.dtype is torch.bfloat16
    return few and both and x.is_cpu and native_kernel() is not None and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x [..., K] and weight [N, K] bfloat16 -> [..., N] bfloat16.

    torch computes what `serves` does not name.
    """
    return multiply(x, weight, bias) if serves(x, weight) else F.linear(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by our kernel, for what `serves` names."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = x.new_empty(rows.shape[0], weight.shape[0])
    native_kernel()(rows, weight, _NO_BIAS if bias is None else bias, out)  # type: ignore[misc]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
