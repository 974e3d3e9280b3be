"""What the host planned, on the device: in one copy, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(planned: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Whole numbers planned on the host as int64 tensors of the device, of the same shapes."""
    if device.type == "cpu":
        return [torch.from_numpy(values.astype(np.int64)) for values in planned]
    moved = _pinned(np.concatenate([values.reshape(-1) for values in planned]).astype(np.int64))
    parts = moved.to(device, non_blocking=True).split([values.size for values in planned])
    return [part.view(values.shape) for part, values in zip(parts, planned, strict=True)]


def values_to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of the host as a tensor [n] of the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    wide = np.int64 if dtype is torch.int64 else np.float64
    return _pinned(np.array(values, dtype=wide)).to(device, non_blocking=True).to(dtype)


def _pinned(values: np.ndarray) -> Tensor:
    """A copy from pageable memory makes the host wait. torch keeps a pinned buffer until the copy from it is done."""
    return torch.from_numpy(values).pin_memory()
