"""Counts our metrics beside vLLM's: our class replaces the one that counts drafts in its Prometheus logger.

vLLM's entry point for loggers is not used: it switches statistics on that a user has switched off, and engines without
a server do not have it. What the policy does comes in files (`policy_reports`). The warning about rejected drafts does
not depend on statistics: its rounds are counted where the scheduler reads their tokens.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

from eagle_plugin.collect.metrics import CountCollector
from eagle_plugin.collect.settings import STORE
from eagle_plugin.common import metric_registry
from eagle_plugin.runtime.lookups import wants_lookups
from eagle_plugin.runtime.request_limits import served_sources
from eagle_plugin.runtime.round_metrics import Recorder, RejectionWatch, RoundMetrics
from eagle_plugin.vllm.plugin_config import is_served, plugin_config
from eagle_plugin.vllm.policy_reports import ReportCollector, counts_of
from eagle_plugin.vllm.request_fields import sources_of

logger = logging.getLogger("vllm.eagle_plugin")
_WATCH = "_eagle_plugin_watch"  # of a scheduler


def export() -> None:
    """Let the Prometheus loggers that this process makes from now on count our metrics too; once is enough."""
    PrometheusStatLogger._spec_decoding_cls = TreeMetrics


class TreeMetrics(SpecDecodingProm):
    """vLLM's counters, and ours where the plugin serves."""

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        is_diffusion: bool = False,
    ) -> None:
        super().__init__(speculative_config, labelnames, per_engine_labelvalues, is_diffusion=is_diffusion)
        metric_registry.forget()
        self._recorders: dict[int, Recorder] = {}
        config = plugin_config(speculative_config)
        if config is not None:
            ours = RoundMetrics(labelnames, config.caps.max_accept_length - 1)
            labels = {number: [*map(str, values)] for number, values in per_engine_labelvalues.items()}
            self._recorders = {number: ours.labelled(*values) for number, values in labels.items()}
            # Several API servers share what they count by files of the client's own, and show nothing else.
            if config.reports is not None and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
                named = {number: dict(zip(labelnames, values, strict=True)) for number, values in labels.items()}
                REGISTRY.register(metric_registry.register(ReportCollector(config.reports, named)))
                if os.environ.get(STORE):
                    files = {counts_of(config.reports, number): values for number, values in named.items()}
                    REGISTRY.register(metric_registry.register(CountCollector(files)))

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Count the verified trees of one step of one engine."""
        super().observe(spec_decoding_stats, engine_idx)
        if recorder := self._recorders.get(engine_idx):
            recorder.record(kept_tokens(spec_decoding_stats), spec_decoding_stats.num_draft_tokens)


def kept_tokens(stats: SpecDecodingStats) -> list[int]:
    """The accepted draft tokens of each round of a step, fewest first; vLLM tells how many rounds reached a depth."""
    reached = [stats.num_drafts, *stats.num_accepted_tokens_per_pos, 0]
    return [depth for depth in range(len(reached) - 1) for _ in range(reached[depth] - reached[depth + 1])]


def watch_rounds(original: Any, scheduler: Any, *given: Any, **named: Any) -> Any:
    """AROUND ``Scheduler.make_spec_decoding_stats``, which is called with the counts of every verified round.

    The watch does not count a request with a thinking budget: at the budget's end it gets one token per round, whatever
    is drafted. Nobody counts a request that asks for no drafts: its rows are padding.
    """
    speculative = scheduler.vllm_config.speculative_config
    if named["num_draft_tokens"] and is_served(speculative):
        request = scheduler.requests.get(named["request_id"])
        sampling = None if request is None else request.sampling_params
        asked = sources_of(sampling)
        if not asked.head and not any(served_sources(asked, wants_lookups())):
            request.spec_decode_metrics = None
            return given[0]  # the statistics so far
        if sampling is not None and sampling.thinking_token_budget is None:
            watch = getattr(scheduler, _WATCH, None)
            if watch is None:
                watch = RejectionWatch(scheduler.vllm_config.model_config.model, speculative.model, logger)
                setattr(scheduler, _WATCH, watch)
            watch.record([named["num_accepted_tokens"]])
    return original(scheduler, *given, **named)
