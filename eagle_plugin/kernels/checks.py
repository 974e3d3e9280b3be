"""Argument checks of the torch path, with the messages of csrc/bindings/checks.h."""

from __future__ import annotations

import torch
from torch import Tensor

ANY = -1  # a size that is not checked


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def check(tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise TypeError for another dtype, ValueError for another shape; -1 in `shape` is any size."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} is {name_of(tensor.dtype)}, wanted {name_of(dtype)}: convert it with .to()")
    if tensor.dim() != len(shape) or any(w not in (ANY, s) for s, w in zip(tensor.shape, shape, strict=True)):
        wanted = ", ".join("*" if w == ANY else str(w) for w in shape)
        found = ", ".join(map(str, tensor.shape))
        raise ValueError(f"{name} has shape [{found}], wanted [{wanted}]: pass a tensor of that shape")
