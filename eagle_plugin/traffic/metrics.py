"""The counts of a capture, by name: Prometheus metrics of the server (docs/metrics.md)."""

from __future__ import annotations

from collections import Counter

PREFIX = "eagle_plugin:"
DROPPED = "dropped:"  # before the reason, in counts
TOTALS = {
    "records": "Answers that were written, one record per choice.",
    "bytes": "Bytes that were written.",
    "filtered": "Answers with private data: left out, or written with placeholders.",
    "removed_segments": "Files of records that the size limit removed.",
}
# A series per reason is there from the start: Prometheus takes the first value of a series for no increase.
REASONS = (
    *("opt_out", "aborted", "queue_full", "too_large", "encoded", "unusable", "empty", "token_ids"),
    *("write_error", "failed", "writer_ended"),
)


class CaptureMetrics:
    """The counters of this process; `update` takes the totals of counts that only grow."""

    part = "capture"  # of the names
    totals = TOTALS  # name -> what it counts
    reasons = REASONS
    dropped = "Answers that were not recorded, by reason."

    def __init__(self, model: str) -> None:
        """Register the metrics; model is the value of the label `model_name`, which the engine's own have too."""
        # Not before: the client looks for PROMETHEUS_MULTIPROC_DIR, which engines set, when it is imported.
        from prometheus_client import Counter as Metric

        part, named = f"{PREFIX}{self.part}_", self.totals.items()
        totals = {name: Metric(f"{part}{name}", what, ["model_name"]) for name, what in named}
        self._dropped = Metric(f"{part}dropped", self.dropped, ["model_name", "reason"])
        self._totals = {name: metric.labels(model) for name, metric in totals.items()}
        for reason in self.reasons:
            self._dropped.labels(model, reason)
        self.made = [*totals.values(), self._dropped]  # for who takes them out of the registry again
        self._model, self._shown = model, Counter[str]()

    def update(self, totals: Counter[str]) -> None:
        """Count what is more than at the last call; names are those of `totals`, and `DROPPED` with a reason."""
        for name, total in totals.items():
            more = total - self._shown[name]
            if more <= 0:
                continue
            self._shown[name] = total
            if name.startswith(DROPPED):
                self._dropped.labels(self._model, name.removeprefix(DROPPED)).inc(more)
            elif name in self._totals:
                self._totals[name].inc(more)
