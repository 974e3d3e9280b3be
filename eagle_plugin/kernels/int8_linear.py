"""A linear layer with int8 weights on a CPU: our kernel where the CPU has AVX2, else torch's for small batches.

A draft head runs once per level for a few rows, so its time is the time to read its weights. Rounding the draft head is
safe: the target verifies every draft, so only the accept length can change, never the output tokens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.kernels import build, loader

# Rows up to which int8 is faster than bfloat16 (benchmarks/kernels.py). With more the products take the time, not the
# reading of weights: torch's kernel then loses to bfloat16 at once, ours only to the tiles of AMX, and with AVX2 alone
# to nothing.
MAX_ROWS_TORCH = MAX_ROWS_AMX = 16
MAX_ROWS = 1024
ANY_ROWS = sys.maxsize
LANES, STEP, GROUP = 16, 4, 64  # of the kernel: outputs per block, inputs per lane, inputs with one scale


class Int8Weight(NamedTuple):
    """Rows of a weight matrix [N, K], each with its own scale: weight is about values * scales[:, None]."""

    values: Tensor  # [N, K] int8; of our kernel [N / 16, K / 4, 16, 4] uint8, 128 more, see csrc/cpu/int8_rows.h
    scales: Tensor  # [N] bfloat16; of our kernel float32

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias; x [..., K] bfloat16 -> [..., N] bfloat16."""
        rows = x.reshape(-1, x.shape[-1])
        kernel = native_kernel() if self.values.dim() == 4 else None
        if kernel is None:
            out = torch._weight_int8pack_mm(rows, self.values, self.scales)
        else:
            out = rows.new_empty(len(rows), len(self.scales))
            kernel(rows, self.values, self.scales, out)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    def serves(self, x: Tensor) -> bool:
        """Whether the int8 layer should take this input, [..., K]."""
        most = max_rows() if self.values.dim() == 4 else MAX_ROWS_TORCH
        return x.is_cpu and x.dtype is torch.bfloat16 and x.numel() <= most * x.shape[-1]

    def rounded(self, inputs: int) -> Tensor:
        """The weight [N, inputs] float32 that the layer multiplies with."""
        values = self.values.float()
        if values.dim() == 4:
            values = (values - 128).transpose(1, 2).flatten(2).flatten(0, 1)[: len(self.scales), :inputs]
        return values * self.scales.float()[:, None]


@functools.cache
def native_kernel() -> Callable[..., Any] | None:
    """Our kernel for this CPU, called with (x, values, scales, out); None where the CPU or the library has none."""
    runs_here = loader.function("has_int8_linear")
    if runs_here is None:
        return None
    if runs_here():
        return loader.function("int8_linear")
    return loader.function("int8_linear_avx2") if build.cpu_flags() >= build.AVX2 else None


@functools.cache
def max_rows() -> int:
    """Rows up to which our kernel is to be used on this CPU."""
    flags = build.cpu_flags()
    if "amx_tile" in flags:
        return MAX_ROWS_AMX
    return MAX_ROWS if flags >= build.AVX512 else ANY_ROWS


def pack(weight: Tensor) -> Int8Weight | None:
    """Round a bfloat16 CPU weight [N, K] to int8, symmetric per row; None where there is no kernel for it.

    The rounded layer is tried on one input; None also if its error is larger than rounding explains.
    """
    if not weight.is_cpu or weight.dtype is not torch.bfloat16 or weight.dim() != 2:
        return None
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=1e-12)
    is_native = native_kernel() is not None
    if not is_native:
        scales = scales.bfloat16()
    values = (wide / scales.float()[:, None]).round().clamp(-127, 127)
    packed = Int8Weight(in_blocks(values) if is_native else values.to(torch.int8).contiguous(), scales)
    x = torch.linspace(-1, 1, weight.shape[1]).bfloat16()[None]
    expected = x.float() @ (values * scales.float()[:, None]).T
    try:
        found = packed.linear(x).float()
    except (RuntimeError, AttributeError):
        return None
    return packed if torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item()) else None


def in_blocks(values: Tensor) -> Tensor:
    """Whole numbers [N, K] from -127 to 127 in the order of our kernel, 128 added: [N / 16, K / 4, 16, 4] uint8."""
    outputs, inputs = values.shape
    padded = torch.zeros(-(-outputs // LANES) * LANES, -(-inputs // GROUP) * GROUP)
    padded[:outputs, :inputs] = values
    blocks = padded.view(-1, LANES, padded.shape[1] // STEP, STEP).transpose(1, 2)
    return (blocks + 128).to(torch.uint8).contiguous()
