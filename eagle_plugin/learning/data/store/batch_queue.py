"""Batches on their way from the target to the store: one thread adds them, while the target computes the next ones.

From a GPU they are copied into pinned memory, on a stream of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.learning.data.dialogues import answers_of, response_mask
from eagle_plugin.learning.data.rows import TokenRow
from eagle_plugin.learning.data.store.feature_store import Document, FeatureWriter

AHEAD = 2  # batches in the memory of the host that are not yet added


class StatesBatch(NamedTuple):
    """What the target has computed of some rows."""

    rows: Sequence[TokenRow]
    lengths: Sequence[int]  # of the rows, in tokens
    ids: Tensor  # [b, n] int64 on the CPU, padded on the right
    aux: Tensor | None  # [b, n, A * H]
    last: Tensor  # [b, n, H]


class HostCopies:
    """Copies the states of batches from one GPU into pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def send(self, batch: StatesBatch) -> tuple[StatesBatch, torch.cuda.Event]:
        """Begin to copy what the present stream computes; returns the copies before they are there, and when they are.

        They must not be read before `synchronize` of the event.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            aux = None if batch.aux is None else self._copy(batch.aux)
            copies = batch._replace(aux=aux, last=self._copy(batch.last))
            # Blocking: who waits for it must not keep a core busy, which launches the next forward.
            return copies, self._stream.record_event(torch.cuda.Event(blocking=True))

    def _copy(self, states: Tensor) -> Tensor:
        # torch uses the pinned memory again, for later batches, when nobody holds it and the copy is done.
        place = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        states.record_stream(self._stream)  # its memory was allocated for the stream of the target
        return place.copy_(states, non_blocking=True)


class BatchQueue:
    """Adds batches to a store in their order, by one thread; at most `AHEAD` of them wait. A context manager.

    Raises:
        DataError: something could not be added or written; told by a later `put`, or at the end of the block.
    """

    def __init__(self, writer: FeatureWriter, device: torch.device) -> None:
        """device: where the states are."""
        self._writer = writer
        self._copies = HostCopies(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, "batch-writer")
        self._waiting: deque[Future[None]] = deque()

    def put(self, batch: StatesBatch, finished: str | None) -> None:
        """Add the documents of a batch; finished: the shard whose last batch it is, if it is that of one."""
        arrival = None
        if self._copies is not None:
            batch, arrival = self._copies.send(batch)
        self._waiting.append(self._pool.submit(self._add, batch, arrival, finished))
        self._take(AHEAD)

    def _add(self, batch: StatesBatch, arrival: torch.cuda.Event | None, finished: str | None) -> None:
        if arrival is not None:
            arrival.synchronize()
        for place, (row, n) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            mask = response_mask(answers_of(row), n)
            aux = None if batch.aux is None else batch.aux[place, :n]
            ids, last = batch.ids[place, :n], batch.last[place, :n]
            self._writer.add(Document(row.id, row.source, row.split, ids, mask, aux, last))
        if finished is not None:
            self._writer.finish(finished)

    def _take(self, most: int) -> None:
        """Wait until at most so many batches are left to add."""
        while len(self._waiting) > most:
            self._waiting.popleft().result()

    def __enter__(self) -> BatchQueue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._take(0)
        finally:
            # After an error, too, what was computed is added, because it may finish a shard. If it was an error of this
            # thread, `FeatureWriter.finish` refuses a shard in which documents are missing.
            self._pool.shutdown()
