"""Captures rounds at start-up: on a GPU or emulated, in the sizes that memory allows, and tells the log of it."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from eagle_plugin.runtime.captured_rounds import CapturedRounds
from eagle_plugin.runtime.graph_emulator import NO_OPERATORS, EmulatedCapturer
from eagle_plugin.runtime.graphs import Buckets, Capturer, CudaCapturer


def emulated() -> bool:
    """Whether graphs are emulated on a CPU, to prove what CUDA would capture: ``EAGLE_GRAPHS=emulate``."""
    return os.environ.get("EAGLE_GRAPHS", "") == "emulate"


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 .. up to `most`: the batch sizes that are captured by the emulator."""
    return [2**i for i in range(most.bit_length())]


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
    """Every capture collects garbage: over the objects of its own time only, and not over those of the whole server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def left_out_without_memory(
    buckets: Buckets,
    size: int,
    in_any_rank: Callable[[bool], bool],
    logger: logging.Logger,
    memory_flag: str,
    batch_flag: str,
) -> Iterator[None]:
    """Around the captures of one batch size: out of memory on the GPU, this size runs without graphs.

    The smaller ones are still tried. In all ranks or in none: what a graph sends to the other ranks goes over other
    channels than without graphs. The flags are the engine's for the memory that it takes and for the largest batch.
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
            "graphs; give the server a smaller %s, or %s %d",
            size,
            memory_flag,
            batch_flag,
            size // 2,
        )


@contextmanager
def _logged(rounds: CapturedRounds[Any], kind: str, logger: logging.Logger) -> Iterator[None]:
    """Around all captures: how many there were, of which batches, and what they took."""
    begin, free = time.perf_counter(), _free_bytes(kind)
    yield
    logger.info(
        "eagle-plugin: %d %s for batches of up to %d requests took %.1f s and %.2f GiB of device memory",
        len(rounds.functions),
        "CUDA graphs" if kind == "cuda" else "emulated graphs",
        max(rounds.sizes(), default=0),
        time.perf_counter() - begin,
        (free - _free_bytes(kind)) / 2**30,
    )


def _free_bytes(kind: str) -> int:
    return torch.cuda.mem_get_info()[0] if kind == "cuda" else 0
