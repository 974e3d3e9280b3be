"""What of a worker's decode rounds is captured: which batch sizes, by which capturer, within which memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.runtime_context import get_exec

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.capturing import (
    MAX_ROWS,
    emulated,
    frozen_garbage,
    left_out_without_memory,
    logged,
    powers_of_two,
)
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer
from eagle_plugin.runtime.graphs import Buckets, CudaCapturer
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.ranks import in_any_rank, rank_logger

logger = logging.getLogger("eagle_plugin")


def capture_rounds(
    decode_round: DecodeRound, caps: Shape, shapes: Sequence[Shape], device: str, most: int, with_sums: bool
) -> None:
    """Capture the rounds of up to `most` requests on a GPU, and on a CPU where graphs are emulated.

    shapes: those within `caps` that rounds may have. with_sums: whether a policy chooses from them.
    """
    if device == "cuda":
        if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            return
        sizes = get_exec().graph.cuda_graph_config.decode.bs
    elif emulated():
        sizes = powers_of_two(most)
    else:
        return
    sizes = [size for size in sizes if size <= most and size * caps.width <= MAX_ROWS]
    if not sizes:
        return
    with logged(decode_round.functions, decode_round.sizes, device, rank_logger(logger)):
        if device == "cuda":
            with graph_capture(), model_capture_mode(), frozen_garbage():
                decode_round.capture(CudaCapturer(), caps, shapes, sizes, _around, with_sums)
        else:
            decode_round.capture(EmulatedCapturer(), caps, shapes, sizes, _around, with_sums)


def _around(buckets: Buckets, size: int) -> AbstractContextManager[None]:
    """Around the captures of one size."""
    fix = f"give the server a smaller --mem-fraction-static, or --cuda-graph-max-bs-decode {size // 2}"
    return left_out_without_memory(buckets, size, in_any_rank, rank_logger(logger), fix)
