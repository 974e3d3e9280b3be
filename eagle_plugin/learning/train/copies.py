"""Batches on their way to a GPU: packed into pinned memory and copied on a stream of their own, while it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle_plugin.learning.train.batches import Batch, PackedDocument, pack


class SentBatch(NamedTuple):
    """A batch on its device, and when it is there; None: now."""

    batch: Batch
    arrival: torch.cuda.Event | None = None

    def receive(self) -> Batch:
        """The batch, for what the present stream computes from now on."""
        if self.arrival is not None:
            stream = torch.cuda.current_stream(self.batch.last.device)
            stream.wait_event(self.arrival)
            for tensor in self.batch.tensors:
                tensor.record_stream(stream)  # its memory was allocated for the stream of the copies
        return self.batch


class GpuCopies:
    """Sends the documents of batches to one GPU, from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def send(self, documents: Sequence[PackedDocument]) -> SentBatch:
        """Begin to copy documents from the CPU, and to expand states in float8; returns before they are there."""
        with torch.cuda.stream(self._stream):  # also makes this GPU the thread's own
            # torch keeps the pinned memory until the copy is done, and uses it for later batches.
            batch = pack(documents, pinned=True).to(self._device, non_blocking=True).expand()
            return SentBatch(batch, self._stream.record_event())
