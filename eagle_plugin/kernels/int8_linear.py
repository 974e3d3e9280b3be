"""A linear layer with int8 weights for small batches on a CPU, over torch's own kernel.

A draft head runs once per level for a few rows, so its time is the time to read its weights. Rounding the draft head is
safe: the target verifies every draft, so only the accept length can change, never the output tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROWS = 16  # with more rows the products, not the reading of weights, take the time, and bfloat16 is as fast


class Int8Weight(NamedTuple):
    """Rows of a weight matrix, each with its own scale: weight is about values * scales[:, None]."""

    values: Tensor  # [N, K] int8
    scales: Tensor  # [N] bfloat16

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias; x [..., K] bfloat16 with few rows -> [..., N] bfloat16."""
        out = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.values, self.scales)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)


def serves(x: Tensor) -> bool:
    """Whether the int8 layer should take this input, [..., K]."""
    return x.is_cpu and x.dtype is torch.bfloat16 and x.numel() <= MAX_ROWS * x.shape[-1]


def pack(weight: Tensor) -> Int8Weight | None:
    """Round a bfloat16 CPU weight [N, K] to int8, symmetric per row; None where torch has no kernel for it.

    The rounded layer is tried on one input; None also if its error is larger than rounding explains.
    """
    if not weight.is_cpu or weight.dtype is not torch.bfloat16 or weight.dim() != 2:
        return None
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()
    values = (wide / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    packed = Int8Weight(values.contiguous(), scales)
    x = torch.linspace(-1, 1, weight.shape[1]).bfloat16()[None]
    expected = x.float() @ (values.float() * scales.float()[:, None]).T
    try:
        found = packed.linear(x).float()
    except (RuntimeError, AttributeError):
        return None
    return packed if torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item()) else None
