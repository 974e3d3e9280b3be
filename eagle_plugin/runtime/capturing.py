"""Captures rounds at start-up: on a GPU or emulated, in the sizes that memory allows, and tells the log of it."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from eagle_plugin.runtime.captured_rounds import CapturedRounds
from eagle_plugin.runtime.graph_emulator import NO_OPERATORS, EmulatedCapturer
from eagle_plugin.runtime.graph_memory import free_bytes
from eagle_plugin.runtime.graphs import Capturer, CudaCapturer


def emulated() -> bool:
    """Whether graphs are emulated on a CPU, to prove what CUDA would capture: ``EAGLE_GRAPHS=emulate``."""
    return os.environ.get("EAGLE_GRAPHS", "") == "emulate"


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 .. up to `most`: the batch sizes that are captured by the emulator."""
    return [2**i for i in range(most.bit_length())]


def gpu_sizes(most: int) -> list[int]:
    """The batch sizes that are captured on a GPU: the powers of two up to `most` and some between them, and `most`.

    Up to 64 one between two powers, which pads a batch by at most a half and costs nothing where a round takes as long
    as the reading of the weights; above three, which pad it by at most a quarter. Engines capture two to four times as
    many; here each has several graphs for each shape of the trees.
    """
    sizes = {1, most}
    for power in powers_of_two(most):
        quarters = (6,) if power < 64 else (5, 6, 7)
        sizes |= {power, *(power * quarter // 4 for quarter in quarters)}
    return sorted(size for size in sizes if size <= most)


@contextmanager
def capturer_for(
    rounds: CapturedRounds[Any],
    kind: str,
    logger: logging.Logger,
    *on_gpu: AbstractContextManager[Any],
    transparent: Mapping[Any, Callable[..., Any]] = NO_OPERATORS,
) -> Iterator[Capturer]:
    """Around all captures of these rounds on a device, "cuda" or "cpu": what makes the graphs.

    on_gpu: contexts of the engine around captures on a GPU. transparent: as of `EmulatedCapturer`.
    """
    with _logged(rounds, kind, logger), ExitStack() as contexts:
        if kind != "cuda":
            yield EmulatedCapturer(transparent)
            return
        for context in (*on_gpu, _frozen_garbage()):
            contexts.enter_context(context)
        yield CudaCapturer()


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Every capture collects garbage: over the objects of its own time only, and not over those of the whole server.

    What an engine has frozen before stays so; it cannot be told from what is frozen here, which then stays so too.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@contextmanager
def _logged(rounds: CapturedRounds[Any], kind: str, logger: logging.Logger) -> Iterator[None]:
    """Around all captures: how many there were, of which batches, and what they took."""
    begin, free = time.perf_counter(), free_bytes(kind)
    yield
    logger.info(
        "eagle-plugin: %d %s for batches of up to %d requests took %.1f s and %.2f GiB of device memory",
        len(rounds.functions),
        "CUDA graphs" if kind == "cuda" else "emulated graphs",
        max(rounds.sizes(), default=0),
        time.perf_counter() - begin,
        (free - free_bytes(kind)) / 2**30,
    )
