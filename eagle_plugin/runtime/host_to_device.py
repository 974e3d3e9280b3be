"""What the host planned, on the device: in one copy, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(planned: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Whole numbers planned on the host as int64 tensors of the device, of the same shapes."""
    if device.type == "cpu":
        return [torch.from_numpy(values.astype(np.int64)) for values in planned]
    together = np.concatenate([values.reshape(-1) for values in planned])
    parts = values_to_device(together, torch.int64, device).split([values.size for values in planned])
    return [part.view(values.shape) for part, values in zip(parts, planned, strict=True)]


def values_to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of the host, in lists or an array, as a tensor of the device.

    A copy from pageable memory makes the host wait. torch keeps a pinned buffer until the copy from it is done.
    """
    return tensor_to_device(torch.tensor(values, dtype=dtype), device)  # with pin_memory=True it refuses arrays


def tensor_to_device(host: Tensor, device: torch.device) -> Tensor:
    """The same for a tensor of the host that nobody changes later."""
    if device.type == "cuda" and torch.cuda.is_available():  # fake CUDA tensors have no pinned memory
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
