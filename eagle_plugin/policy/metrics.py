"""What the policy does, as Prometheus metrics: one table of names for both engines (docs/metrics.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from eagle_plugin.common.metric_registry import PREFIX, register
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.prediction_errors import cumulated
from eagle_plugin.policy.report import PolicyReport, ShapeTotals

GAUGES_EVERY = 1.0  # seconds


class TotalMetric(NamedTuple):
    """A counter by shape."""

    name: str
    field: str  # of ShapeTotals
    what: str


class ReportMetric(NamedTuple):
    """A gauge of what the policy expects at present, or a counter that a report has."""

    name: str
    label: str | None  # its own, after the engine's
    values: Callable[[PolicyReport], Mapping[str, float]]  # by the value of that label; without one under ""
    what: str


def _of_shapes(values: Mapping[Shape, float]) -> dict[str, float]:
    return {str(shape): float(value) for shape, value in values.items()}


TOTALS = (
    TotalMetric("shape_rounds", "rounds", "Rounds of requests, plain ones too."),
    TotalMetric("shape_tokens", "tokens", "Tokens that rounds yielded, the target's own (bonus) tokens included."),
    TotalMetric("shape_steps", "steps", "Rounds of batches."),
    TotalMetric("timed_steps", "timed", "Rounds of batches whose time is known."),
    TotalMetric("step_seconds", "seconds", "Seconds that the timed steps took."),
    TotalMetric("predicted_step_seconds", "predicted", "Seconds that the policy expected of the timed steps."),
)
COUNTS = (
    ReportMetric(
        "predicted_phase_seconds",
        "phase",
        lambda report: report.phases,
        "Seconds that the policy expected of this phase of the timed steps; no phase is timed.",
    ),
    ReportMetric(
        "prediction_error_steps",
        "le",
        lambda report: cumulated(report.errors),
        "Timed steps with |measured / predicted - 1| up to this.",
    ),
)
GAUGES = (
    ReportMetric(
        "expected_tokens_per_second",
        "shape",
        lambda report: _of_shapes(report.rates()),
        "What the policy expects of the present batch, if its rounds have this shape.",
    ),
    ReportMetric(
        "expected_step_seconds",
        "shape",
        lambda report: _of_shapes({shape: x.seconds for shape, x in report.expected.items()}),
        "What the policy expects of one step of the present batch with this shape.",
    ),
    ReportMetric(
        "chosen_shape",
        "shape",
        lambda report: _of_shapes({shape: shape == report.present for shape in report.expected}),
        "1 for the shape that the policy chooses at present, 0 for the others.",
    ),
    ReportMetric(
        "calibration_factor",
        "depth",
        lambda report: {str(depth): factor for depth, factor in enumerate(report.factors, start=1)},
        "Accepted over predicted tokens of this depth.",
    ),
    ReportMetric(
        "slowdown",
        None,
        lambda report: {"": report.slowdown} if report.expected else {},
        "Seconds of a step over those that were measured at the start, of all shapes.",
    ),
    ReportMetric(
        "prompt_reading_seconds",
        None,
        lambda report: {"": report.reading} if report.expected else {},
        "Seconds per output token in which the head reads prompts, if trees are drafted.",
    ),
    ReportMetric(
        "policy_requests",
        None,
        lambda report: {"": report.requests} if report.expected else {},
        "Requests of the present batch.",
    ),
    ReportMetric(
        "policy_prefix_tokens",
        None,
        lambda report: {"": report.prefix_tokens} if report.expected else {},
        "Tokens of the prefixes of the present batch.",
    ),
)


class PolicyMetrics:
    """The metrics of an engine in the process that has its policy."""

    def __init__(self, labels: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        """Register the metrics with these labels, which are the engine's own."""
        from prometheus_client import Counter, Gauge

        def counter(metric: TotalMetric | ReportMetric, label: str) -> Any:
            return register(Counter(PREFIX + metric.name, metric.what, [*labels, label]))

        def gauge(metric: ReportMetric) -> Any:
            names = [*labels, *([metric.label] if metric.label else [])]
            return register(Gauge(PREFIX + metric.name, metric.what, names, multiprocess_mode="mostrecent"))

        self._values, self._clock = tuple(labels.values()), clock
        self._totals = [(x, counter(x, "shape")) for x in TOTALS]
        self._counts = [(x, counter(x, str(x.label))) for x in COUNTS]
        self._gauges = [(x, gauge(x)) for x in GAUGES]
        self._counted: dict[Shape, ShapeTotals] = {}
        self._counted_labels: dict[tuple[str, str], float] = {}  # by name and label, of the COUNTS
        self._shown: float | None = None

    def record(self, chooser: ShapeChooser) -> None:
        """Count the rounds since the last call; what a report has is counted and set at most once per second."""
        for shape, totals in chooser.totals.items():
            before = self._counted.get(shape, ShapeTotals())
            if totals != before:
                self._counted[shape] = totals
                for metric, counter in self._totals:
                    added = getattr(totals, metric.field) - getattr(before, metric.field)
                    counter.labels(*self._values, str(shape)).inc(added)
        now = self._clock()
        if chooser.policy is not None and (self._shown is None or now - self._shown >= GAUGES_EVERY):
            self._shown = now
            report = chooser.report()
            for shown, gauge in self._gauges:
                for label, value in shown.values(report).items():
                    gauge.labels(*self._values, *([label] if shown.label else [])).set(value)
            for counted, counter in self._counts:
                for label, value in counted.values(report).items():
                    key = counted.name, label
                    counter.labels(*self._values, label).inc(value - self._counted_labels.get(key, 0.0))
                    self._counted_labels[key] = value


def families(report: PolicyReport | None, labels: Mapping[str, str]) -> Iterator[Any]:
    """The same metrics with the numbers of a report that another process wrote; without one they have no numbers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    values = list(labels.values())
    for total in TOTALS:
        counter = CounterMetricFamily(PREFIX + total.name, total.what, labels=[*labels, "shape"])
        for shape, totals in report.totals.items() if report else ():
            counter.add_metric([*values, str(shape)], getattr(totals, total.field))
        yield counter
    for metric in COUNTS:
        counter = CounterMetricFamily(PREFIX + metric.name, metric.what, labels=[*labels, str(metric.label)])
        for label, value in metric.values(report).items() if report else ():
            counter.add_metric([*values, label], value)
        yield counter
    for metric in GAUGES:
        own = [metric.label] if metric.label else []
        gauge = GaugeMetricFamily(PREFIX + metric.name, metric.what, labels=[*labels, *own])
        for label, value in metric.values(report).items() if report else ():
            gauge.add_metric([*values, *([label] if own else [])], value)
        yield gauge
