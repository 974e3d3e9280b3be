"""Gives the adapter one form of what releases of SGLang have in different forms, chosen by what the engine has.

A form goes when the last release that has it leaves `version.TESTED`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model, get_observability
from sglang.srt.speculative.spec_utils import draft_tp_context

_COUNTS_REQUESTS = hasattr(SchedulerMetricsReporter, "snapshot_spec_decode_metrics")
_LOOKS_AT_BATCH = "forward_batch" in inspect.signature(forward_context).parameters


def sharded_as_drafter(drafter: Any) -> AbstractContextManager[Any]:
    """Around the work of an ``EagleDraftWorker``: how the head is sharded. Older releases have one flag for it."""
    has_layout = hasattr(drafter, "parallel_layout")
    return draft_tp_context(drafter.parallel_layout if has_layout else drafter.draft_owns_attention)


def prepare_adapters_in_place(manager: Any, most: int, width: int) -> None:
    """Let a ``LoRAManager`` write what it prepares of up to `most` requests, of `width` rows each, to fixed addresses.

    Older releases have one name for prompts and other batches.
    """
    named = getattr(manager, "init_decode_cuda_graph_batch_info", None) or manager.init_cuda_graph_batch_info
    named(max_bs_in_cuda_graph=most, num_tokens_per_req=width)


def metrics_read_lengths() -> bool:
    """Whether the engine's metrics of forward passes read a decode batch's lengths on the host.

    Newer releases count the tokens of its requests.
    """
    return not _COUNTS_REQUESTS and bool(get_observability().enable_forward_pass_metrics)


@contextmanager
def forward_of(model: Any, attention: Any, forward_batch: Any) -> Iterator[None]:
    """Around a forward of a model that its ``ModelRunner`` does not run: what the runner sets around its own.

    Older releases know neither how a model's shared experts are fused nor the batch there.
    """
    context = ForwardContext(attn_backend=attention)
    with ExitStack() as stack:
        if hasattr(model, "shared_experts_config"):
            stack.enter_context(get_model().override(shared_experts=model.shared_experts_config))
        looked_at = {"forward_batch": forward_batch} if _LOOKS_AT_BATCH else {}
        stack.enter_context(forward_context(context, **looked_at))
        yield
