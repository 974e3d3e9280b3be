"""Random contents of caches of 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor


def random_bits(gen: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Finite numbers of an 8-bit float, each of its bit patterns as likely as any other."""
    bits = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = bits[bits.float().isfinite()].view(torch.uint8)
    return finite[torch.randint(0, len(finite), shape, generator=gen)].view(dtype)
