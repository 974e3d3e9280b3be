"""Makes a `TreeWorker` that must not serve into the engine's own worker, before the first request.

By the time that the real round can be tested, the weights are loaded, the memory pools are made and the scheduler holds
our worker. A second worker would load the head again and need pools of its own. But ours is a subclass of the engine's,
its drafter is a subclass of the engine's draft worker, and both were built by the engine's own code up to the attention
backends: so the two objects get back the engine's classes, and run the steps of the engine's start that ours replace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.spec_utils import draft_pp_context

from eagle_plugin.common.errors import UserError, first_line
from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.releases import sharded_as_drafter


def fall_back(worker: Any, reasons: Sequence[str], next_start: str) -> None:
    """Give the worker the engine's class, attention, sampler and graphs; reasons: what the self-test found.

    next_start: what the user does if that fails (`selftest.decision.next_start`).

    Raises:
        StartRefused: that failed too.
    """
    try:
        _restore(worker)
    except Exception as error:
        first, found = first_line(error), f" ({reasons[0]})" if reasons else ""
        raise StartRefused(
            UserError(
                f"the self-test failed{found} and SGLang's own worker could not take over ({first}); {next_start}"
            )
        ) from error


def _restore(worker: Any) -> None:
    target, drafter = worker.target_worker, worker.draft_worker
    if drafter.levels.block is not None:
        raise UserError("its worker for block drafters is no class that ours is made of")
    runner, draft_runner = target.model_runner, drafter.draft_runner
    # And with them the graphs.
    for name in ("_round", "_reader", "_verifier", "_keys", "_sampler", "_ranks", "_shared", "shapes"):
        vars(worker).pop(name, None)
    del target.init_cuda_graphs  # ours, on the object, hides the engine's
    runner.attn_backend = _wrapped(runner.attn_backend)
    runner.sampler = Sampler()
    for name in ("tree_attention", "_chain", "_nothing", "_most_children", "_forward", "levels"):
        vars(drafter).pop(name, None)
    draft_runner.attn_backend = _wrapped(draft_runner.attn_backend)
    drafter.topk = get_spec().speculative_eagle_topk
    drafter.__class__, worker.__class__ = EagleDraftWorker, EAGLEWorkerV2
    on_gpu = worker.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    with _as_drafter(drafter):
        drafter.init_attention_backend()
    if on_gpu:
        runner.init_decode_cuda_graph()
        with _as_drafter(drafter):
            drafter._capture_cuda_graphs()


@contextmanager
def _as_drafter(drafter: Any) -> Iterator[None]:
    """What the engine's worker sets around the steps of its drafter's start."""
    with (
        draft_pp_context(),
        sharded_as_drafter(drafter),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


def _wrapped(attention: Any) -> Any:
    """The engine's attention backend under ours."""
    return attention._base if isinstance(attention, TreeAttention) else attention
