"""Exports what the policy does as Prometheus metrics, in both engines (docs/metrics.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eagle_plugin.common.metric_registry import PREFIX, register
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.metric_table import OF_REPORT, POLICY, TOTALS, Metric
from eagle_plugin.policy.report import PolicyReport, ShapeTotals

REPORT_EVERY = 1.0  # seconds


class PolicyMetrics:
    """The metrics of an engine in the process that has its policy."""

    def __init__(self, labels: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        """Register the metrics with these labels, which are the engine's own."""
        self._values, self._clock = tuple(labels.values()), clock
        self._metrics = {metric: exported(metric, list(labels)) for metric in POLICY}
        self._totals: dict[Shape, ShapeTotals] = {}  # that were counted
        self._counted: dict[tuple[Metric, str], float] = {}  # of a report's counters, by their own label
        self._reported: float | None = None

    def record(self, chooser: ShapeChooser) -> None:
        """Count the rounds since the last call; what a report has is counted and set at most once per second."""
        for shape, totals in chooser.totals.items():
            before = self._totals.get(shape, ShapeTotals())
            if totals != before:
                self._totals[shape] = totals
                for field, metric in TOTALS.items():
                    added = getattr(totals, field) - getattr(before, field)
                    self._metrics[metric].labels(*self._values, str(shape)).inc(added)
        now = self._clock()
        if (chooser.policy, chooser.looked_up) == (None, None) or (
            self._reported is not None and now - self._reported < REPORT_EVERY
        ):
            return
        self._reported, report = now, chooser.report()
        for metric, values in OF_REPORT.items():
            for label, value in values(report).items():
                sample = self._metrics[metric].labels(*self._values, *([label] if metric.label else []))
                if metric.kind == "counter":
                    sample.inc(value - self._counted.get((metric, label), 0.0))
                    self._counted[metric, label] = value
                else:
                    sample.set(value)


def exported(metric: Metric, labels: Sequence[str], **more: Any) -> Any:
    """The metric with the engine's labels and its own, in this process's registry; more: as its class takes it."""
    # Not before: the client looks for PROMETHEUS_MULTIPROC_DIR, which engines set, when it is imported.
    from prometheus_client import Counter, Gauge, Histogram

    if metric.kind == "gauge":
        more = {"multiprocess_mode": "mostrecent"}
    kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind]
    return register(kind(PREFIX + metric.name, metric.what, [*labels, *metric.own_labels], **more))


def families(reports: Sequence[tuple[PolicyReport | None, Mapping[str, str]]]) -> Iterator[Any]:
    """The same metrics with the numbers of reports that other processes wrote, each with its labels, which all have
    the same names; a report that is None has no numbers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    names = list(dict.fromkeys(name for _, labels in reports for name in labels))
    for metric in POLICY:
        kind: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(PREFIX + metric.name, metric.what, labels=[*names, *metric.own_labels])
        for report, labels in reports:
            for label, value in _values(metric, report).items() if report else ():
                family.add_metric([*labels.values(), *([label] if metric.label else [])], value)
        yield family


def _values(metric: Metric, report: PolicyReport) -> Mapping[str, float]:
    """The numbers of a metric in a report, by the metric's own label."""
    if metric in OF_REPORT:
        return OF_REPORT[metric](report)
    (field,) = (field for field, of_totals in TOTALS.items() if of_totals is metric)
    return {str(shape): getattr(totals, field) for shape, totals in report.totals.items()}
