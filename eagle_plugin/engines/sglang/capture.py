"""What of a worker's decode rounds is captured: which batch sizes, by which capturer, within which memory."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.runtime_context import get_exec

from eagle_plugin.core.shape import Shape
from eagle_plugin.engines.graph_emulator import EmulatedCapturer
from eagle_plugin.engines.graphs import Buckets, CudaCapturer
from eagle_plugin.engines.sglang.decode_round import DecodeRound
from eagle_plugin.engines.sglang.ranks import in_any_rank, rank_logger

logger = logging.getLogger("eagle_plugin")
# Rows of the largest captured target forward: its logits take 4 bytes per row and token of the vocabulary.
MAX_ROWS = 1024


def emulated() -> bool:
    """Whether graphs are emulated on a CPU, to prove what CUDA would capture: ``EAGLE_GRAPHS=emulate``."""
    return os.environ.get("EAGLE_GRAPHS", "") == "emulate"


def capture_rounds(decode_round: DecodeRound, caps: Shape, shapes: Sequence[Shape], device: str, most: int) -> None:
    """Capture the rounds of up to `most` requests on a GPU, and on a CPU where graphs are emulated.

    shapes: those within `caps` that rounds may have.
    """
    if device == "cuda":
        if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            return
        sizes = get_exec().graph.cuda_graph_config.decode.bs
    elif emulated():
        sizes = [2**i for i in range(most.bit_length())]
    else:
        return
    sizes = [size for size in sizes if size <= most and size * caps.width <= MAX_ROWS]
    if not sizes:
        return
    begin, free = time.perf_counter(), _free_bytes(device)
    if device == "cuda":
        with graph_capture(), model_capture_mode(), _frozen_garbage():
            decode_round.capture(CudaCapturer(), caps, shapes, sizes, _around)
    else:
        decode_round.capture(EmulatedCapturer(), caps, shapes, sizes, _around)
    kind = "CUDA graphs" if device == "cuda" else "emulated graphs"
    rank_logger(logger).info(
        "eagle-plugin: %d %s for batches of up to %d requests took %.1f s and %.2f GiB of device memory",
        len(decode_round.functions),
        kind,
        max(decode_round.sizes(), default=0),
        time.perf_counter() - begin,
        (free - _free_bytes(device)) / 2**30,
    )


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
def _around(buckets: Buckets, size: int) -> Iterator[None]:
    """Out of memory on the GPU: this batch size runs without graphs, the smaller ones are still tried.

    In all ranks or in none: what a graph sends to the other ranks goes over other channels than without graphs.
    """
    out_of_memory = False
    try:
        yield
    except torch.OutOfMemoryError:
        out_of_memory = True
    if in_any_rank(out_of_memory):
        buckets.drop(size)
        torch.cuda.empty_cache()
        rank_logger(logger).warning(
            "eagle-plugin: no memory is left for the CUDA graphs of %d requests: such batches are served without "
            "graphs; give the server a smaller --mem-fraction-static, or --cuda-graph-max-bs %d",
            size,
            size // 2,
        )


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
