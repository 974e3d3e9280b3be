"""Copies values of a device into memory of the host, which reads them a round later."""

from __future__ import annotations

import torch
from torch import Tensor


class HostBuffers:
    """A few buffers by turns, pinned where the device is a GPU, so that a copy makes nobody wait.

    A copy is made on the stream that computes the values: what runs there later cannot overwrite them before, which
    memory of a captured graph would be. Whoever reads a buffer knows that the device is done with that stream up to the
    copy, and reads it before `TURNS` further copies.
    """

    TURNS = 4  # a scheduler is at most one round ahead of the results that it reads

    def __init__(self, floats: int, device: torch.device | str) -> None:
        """floats: of the largest values."""
        pinned = torch.device(device).type == "cuda"
        self._buffers = [torch.empty(floats, dtype=torch.float32, pin_memory=pinned) for _ in range(self.TURNS)]
        self._turn = 0
        self._views: dict[tuple[int, torch.Size], Tensor] = {}  # by turn and shape

    def copy(self, values: Tensor) -> Tensor:
        """Start the copy of float32 values; a tensor of their shape on the host, which has them when it ends."""
        self._turn = (self._turn + 1) % self.TURNS
        key = self._turn, values.shape
        if key not in self._views:
            self._views[key] = self._buffers[self._turn][: values.numel()].view(values.shape)
        return self._views[key].copy_(values, non_blocking=True)
