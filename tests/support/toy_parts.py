"""What the self-test and the measurement of costs run on, of toy models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from toy_engine import COLUMNS, DRAFT_V, ROWS, SHAPE, Drafter, V, Verifier

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer
from eagle_plugin.runtime.graph_memory import GraphMemory
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
    sizes: Sequence[int] = SIZES,
    kind: type[Drafter] = Drafter,
    shapes: Sequence[Shape] = (PLAIN, SHAPE),
    pools: tuple[Any, Any] | None = None,
) -> Parts:
    """A round of toy models, captured for these batch sizes and shapes.

    pools: of the engine, for keys and values of the target and of the head; None: the models have their own memory.
    """
    drafter, verifier = kind(), Verifier(pools and pools[0])
    if pools:
        drafter.model.keep_in(pools[1])
    table, keys = torch.zeros(ROWS, COLUMNS, dtype=torch.int32), KeyTable(ROWS, "cpu", seed=1)
    reader = BatchReader(SHAPE.reach, 8, table, keys)
    decode_round = DecodeRound(drafter, verifier, reader)
    if sizes:
        decode_round.capture(EmulatedCapturer(), SHAPE, shapes, list(sizes), GraphMemory())
    # The slots of both models are those of the table.
    caches = [(x, Pool(None)) for model in (verifier.model, drafter.model) for x in (model.keys, model.values)]
    if pools:
        caches = [(x, Pool(pool)) for pool in pools for x in (*pool.k_buffer, *pool.v_buffer)]
    return Parts(
        decode_round, reader, verifier, drafter, SHAPE, V, DRAFT_V, table, keys.table, Allocator(), caches,
        torch.float32,
    )  # fmt: skip
