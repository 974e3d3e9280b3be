"""vLLM's names of the caches of 8-bit floats that our attention reads."""

from __future__ import annotations

import torch

# vLLM keeps them as bytes, with one scale of a layer's keys and one of its values.
FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
