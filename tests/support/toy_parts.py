"""What the self-test and the measurement of costs run on, of toy models."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from toy_engine import COLUMNS, DRAFT_V, ROWS, SHAPE, Drafter, V, Verifier

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer
from eagle_plugin.runtime.rng import KeyTable
from eagle_plugin.sglang.batch import BatchReader
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.dummy_batches import Parts
from eagle_plugin.sglang.pools import Pool


class Allocator:
    """Of cache slots, as SGLang's with pages of one token."""

    page_size = 1

    def __init__(self) -> None:
        self.free_slots = torch.arange(1, ROWS * COLUMNS)

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, n: int) -> Tensor | None:
        if n > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:n], self.free_slots[n:]
        return taken

    def free(self, slots: Tensor) -> None:
        self.free_slots = torch.cat([self.free_slots, slots])


SIZES = (1, 4)


def parts(
    sizes: Sequence[int] = SIZES, kind: type[Drafter] = Drafter, shapes: Sequence[Shape] = (PLAIN, SHAPE)
) -> Parts:
    """A round of toy models, captured for these batch sizes and shapes."""
    drafter, verifier = kind(), Verifier()
    table, keys = torch.zeros(ROWS, COLUMNS, dtype=torch.int32), KeyTable(ROWS, "cpu", seed=1)
    reader = BatchReader(SHAPE.reach, 8, table, keys)
    decode_round = DecodeRound(drafter, verifier, reader)
    if sizes:
        decode_round.capture(EmulatedCapturer(), SHAPE, shapes, list(sizes), lambda *_: contextlib.nullcontext())
    pool = Pool(None)  # of both models: their slots are those of the table
    caches = [(cache, pool) for model in (verifier.model, drafter.model) for cache in (model.keys, model.values)]
    return Parts(
        decode_round, reader, verifier, drafter, SHAPE, V, DRAFT_V, table, keys.table, Allocator(), caches
    )  # fmt: skip
