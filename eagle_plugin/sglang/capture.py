"""Captures a worker's decode rounds at start-up, for the batch sizes that SGLang captures and memory allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.shapes import captured_shapes
from eagle_plugin.runtime.capturing import capturer_for, emulated, gpu_sizes, powers_of_two
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.ranks import raised_in_all_ranks
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.deferred_extend import DeferredTokens
from eagle_plugin.sglang.graph_inputs import captures, mark_inputs
from eagle_plugin.sglang.ranks import in_any_rank, rank_logger

logger = logging.getLogger("eagle_plugin")


def prepare_rounds(worker: Any, mode: str) -> None:
    """The first round of a `TreeWorker`, and the captures of what it may run; mode: of its policy."""
    decode_round, caps, pool = worker._round, worker.shape, worker.req_to_token_pool
    with raised_in_all_ranks(in_any_rank):  # before the engine's own contexts of captures, which gather as well
        *_, output, _, _ = decode_round.padding_round(PLAIN)
        decode_round.deferred = DeferredTokens(len(pool.req_to_token), output.features[0])
    decode_round.narrows = mode != "fixed"
    shapes = [PLAIN, caps] if mode == "fixed" else captured_shapes(caps, worker._draft_worker.levels.kind)
    if worker._adapters.can_be_captured:
        runner = worker.target_worker.model_runner
        capture_rounds(decode_round, caps, shapes, worker.device, pool.size, mode == "auto", runner)
    if worker.device == "cuda":
        decode_round.deferred.read_padding(worker._reader, worker._draft_worker, pool.size, in_any_rank)


def capture_rounds(
    decode_round: DecodeRound,
    caps: Shape,
    shapes: Sequence[Shape],
    device: str,
    most: int,
    with_sums: bool,
    runner: Any,
) -> None:
    """Capture the rounds of up to `most` requests on a GPU, and on a CPU where graphs are emulated.

    shapes: those within `caps` that rounds may have. with_sums: whether a policy chooses from them. runner: the
    target's ``ModelRunner``.
    """
    if device == "cuda":
        if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            return
        sizes = sizes_up_to(most, get_exec().graph.cuda_graph_config.decode.bs)
    elif emulated():
        sizes = powers_of_two(most)
    else:
        return
    logits = partial(engine_logits, runner)
    with capturer_for(decode_round, device, rank_logger(logger), captures(), model_capture_mode()) as capturer:
        decode_round.capture(capturer, caps, shapes, sizes, graph_memory(device), with_sums, logits)


def sizes_up_to(most: int, engines: Sequence[int]) -> list[int]:
    """The batch sizes of the engine's list up to `most` requests, and `most`; of a list that has all of them, those of
    `gpu_sizes`.

    As its own ``get_batch_sizes_to_capture``, but without what that makes of `most` for ranks that divide the rows of
    attention: our rounds are divided whatever their rows, and their static memory has `most` requests.
    """
    sizes = sorted({min(size, most) for size in engines})
    few = gpu_sizes(sizes[-1])
    return few if set(few) <= set(sizes) and not get_exec().graph.disable_cuda_graph_padding else sizes


def graph_memory(device: str) -> GraphMemory:
    """What the graphs of all ranks may take."""
    flags = "--mem-fraction-static", "--cuda-graph-max-bs-decode"
    return GraphMemory(device, in_any_rank, rank_logger(logger), *flags, mark=mark_inputs)


def engine_logits(runner: Any, rows: int, vocabulary: int) -> Tensor | None:
    """The logits buffer that the engine's own graphs share, [rows, vocabulary] float32; None if it has none, or one
    that is too small.

    Captures of prompts make it, for as many rows as the engine's decode graphs would need, which we replace. Prompts
    and rounds follow each other on one stream, and neither reads its logits once the other has begun: the engine's own
    rounds use it in the same way. It is not made here, because it would have more rows than ours.
    """
    shared = getattr(runner, "graph_shared_output", None)
    if shared is None or vocabulary not in shared._logits_buffers or rows > shared.max_rows:
        return None
    return shared.get_logits_buffer(vocabulary, rows=rows)  # type: ignore[no-any-return]
