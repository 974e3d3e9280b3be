"""Captures at start-up in both engines: where graphs are emulated, within which memory, and what the log says."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from eagle_plugin.runtime.graphs import Buckets, CapturedFunctions

# Rows of the largest captured round: the target's logits take 4 bytes per row and token of the vocabulary.
MAX_ROWS = 1024


def emulated() -> bool:
    """Whether graphs are emulated on a CPU, to prove what CUDA would capture: ``EAGLE_GRAPHS=emulate``."""
    return os.environ.get("EAGLE_GRAPHS", "") == "emulate"


def powers_of_two(most: int) -> list[int]:
    """The batch sizes that are captured by the emulator: 1, 2, 4 ... up to `most`."""
    return [2**i for i in range(most.bit_length())]


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Every capture collects garbage: over the objects of its own time only, and not over those of the whole server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def left_out_without_memory(
    buckets: Buckets, size: int, in_any_rank: Callable[[bool], bool], logger: logging.Logger, fix: str
) -> Iterator[None]:
    """Around the captures of one batch size: out of memory on the GPU, this size runs without graphs.

    The smaller ones are still tried. In all ranks or in none: what a graph sends to the other ranks goes over other
    channels than without graphs. fix: what the user can do, for the warning.
    """
    out_of_memory = False
    try:
        yield
    except torch.OutOfMemoryError:
        out_of_memory = True
    if in_any_rank(out_of_memory):
        buckets.drop(size)
        torch.cuda.empty_cache()
        logger.warning(
            "eagle-plugin: no memory is left for the CUDA graphs of %d requests: such batches are served without "
            "graphs; %s",
            size,
            fix,
        )


@contextmanager
def logged(
    functions: CapturedFunctions, sizes: Callable[[], list[int]], kind: str, logger: logging.Logger
) -> Iterator[None]:
    """Around all captures: how many there were, of which batches, and what they took.

    sizes: the captured batch sizes, when it is over. kind: "cuda" or "cpu", the device's.
    """
    begin, free = time.perf_counter(), _free_bytes(kind)
    yield
    logger.info(
        "eagle-plugin: %d %s for batches of up to %d requests took %.1f s and %.2f GiB of device memory",
        len(functions),
        "CUDA graphs" if kind == "cuda" else "emulated graphs",
        max(sizes(), default=0),
        time.perf_counter() - begin,
        (free - _free_bytes(kind)) / 2**30,
    )


def _free_bytes(kind: str) -> int:
    return torch.cuda.mem_get_info()[0] if kind == "cuda" else 0
