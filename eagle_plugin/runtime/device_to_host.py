"""What the device computed, on the host, without waiting for what is queued on the device later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """The values of a tensor that nobody changes before the work queued on its stream by then is done."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values, None
        if values.device.type == "cuda" and torch.cuda.is_available():  # fake CUDA tensors have no pinned memory
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """The values; waits for the copy alone."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()  # type: ignore[no-any-return]
