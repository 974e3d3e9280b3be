"""vLLM's names of the caches of 8-bit floats that our attention reads."""

from __future__ import annotations

import torch

# vLLM keeps them as bytes, with one scale of a layer's keys and one of its values.
FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def dtype_name(named: str) -> str:
    """torch's name of the dtype of a cache of this ``--kv-cache-dtype``; "auto" where that is the model's own."""
    return str(FLOAT8[named]).removeprefix("torch.") if named in FLOAT8 else "auto"
