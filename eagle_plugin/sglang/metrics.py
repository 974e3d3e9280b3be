"""Counts the rounds of a scheduler: for our metrics beside SGLang's with ``--enable-metrics``, and in any case for the
policy, its log line, and the warning about rejected drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.log import PolicyLog
from eagle_plugin.policy.metrics import PolicyMetrics
from eagle_plugin.runtime.round_metrics import Recorder, RejectionWatch, RoundMetrics

READ_ROUND = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._resolve_spec_v2_tokens"
)


def count_rounds(
    shape: Shape, watch: RejectionWatch, chooser: Callable[[], ShapeChooser], logger: logging.Logger
) -> None:
    """Count the rounds of this process, whose trees have these caps, and tell their results to the chooser.

    chooser gives the present one, logger gets the lines of `PolicyLog`. Raises LogSecondsError.

    To be called when the worker serves: a hook at start-up would import the scheduler into the launcher, and with it
    the Prometheus client, before SGLang has set the folder in which its processes share their values.
    """
    source = HookSource("eagle_plugin", "eagle-plugin")
    HookRegistry.register(
        READ_ROUND, RoundCounter(shape, watch, chooser, PolicyLog(chooser, logger)), HookType.AROUND, source=source
    )
    HookRegistry.apply_hooks()


class RoundCounter:
    """AROUND the step of the scheduler's result processor that reads a round's tokens, which are on the host by then.

    A request that has ended is verified once more under overlap scheduling; that round is not counted. A request that
    asks for no drafts verifies no tree: our metrics of trees do not count its rounds.
    """

    def __init__(
        self, shape: Shape, watch: RejectionWatch, chooser: Callable[[], ShapeChooser], log: PolicyLog
    ) -> None:
        self._shape, self._watch, self._chooser, self._log = shape, watch, chooser, log
        self._recorders: tuple[Recorder, PolicyMetrics] | None = None

    def __call__(self, original: Any, processor: Any, result: Any, batch: Any) -> Any:
        """Read the tokens as the engine does, and count."""
        live = [not (request.is_retracted or request.finished()) for request in batch.reqs]
        tokens = original(processor, result, batch)
        accepted: list[int] = result.num_correct_drafts_per_req_cpu
        kept = [n for n, counts in zip(accepted, live, strict=True) if counts]
        places = None if result.served is None else result.served.drafting
        with_drafts = kept if places is None else [accepted[i] for i in places if live[i]]
        drafted = result.speculative_num_draft_tokens - 1
        if drafted:
            self._watch.record(with_drafts)
        chooser = self._chooser()
        chooser.observe(result.served, kept, with_drafts)
        if processor.metrics_reporter.current_scheduler_metrics_enabled:
            rounds, policy = self._metrics(processor.metrics_reporter.metrics_collector)
            if drafted:
                rounds.record(with_drafts, drafted * len(with_drafts))
                rounds.record_eager(result.eager_reasons)
            policy.record(chooser)
        self._log.step()
        return tokens

    def _metrics(self, collector: Any) -> tuple[Recorder, PolicyMetrics]:
        """With the labels of the engine's own."""
        if self._recorders is None:
            labels = {name: str(value) for name, value in collector.labels.items()}
            rounds = RoundMetrics(list(labels), self._shape.max_accept_length - 1).labelled(*labels.values())
            self._recorders = rounds, PolicyMetrics(labels)
        return self._recorders
