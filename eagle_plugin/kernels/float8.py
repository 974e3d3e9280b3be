"""The 8-bit floats of a quantised cache of keys and values, and how numbers become them.

A number x is kept as x / scale, where the scale is one of a layer's keys or of its values; what reads the cache
multiplies by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x / scale in one of `FLOAT8`: rounded to nearest even, at most the largest finite number; NaN stays NaN.

    x [...] of any float type, scale [1] float32, None: 1.
    """
    exact = x.float() if scale is None else x.float() / scale
    most = torch.finfo(dtype).max
    return exact.clamp(-most, most).to(dtype)
