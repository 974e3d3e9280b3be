"""The counts of a collection, by name: Prometheus metrics of the server (docs/metrics.md)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_plugin.common.json_files import kept_object
from eagle_plugin.traffic.metrics import DROPPED, PREFIX, CaptureMetrics

TOTALS = {
    "documents": "Documents whose hidden states were written.",
    "tokens": "Their tokens.",
    "bytes": "Bytes that were written.",
}
REASONS = (
    *("queue_full", "write_error", "failed", "writer_ended", "too_short", "looping", "unfinished"),
    *("not_from_start", "not_text_of_the_target", "too_large", "incomplete"),
)
DROPPED_HELP = "Requests that asked for it and whose hidden states were not written, by reason."


class FeatureMetrics(CaptureMetrics):
    """The counters where the worker's process exports metrics itself."""

    part, totals, dropped, reasons = "features", TOTALS, DROPPED_HELP, REASONS


class CountFile:
    """The same counts for another process that exports metrics: a file, replaced at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def update(self, totals: Counter[str]) -> None:
        """Write the totals; a folder that is gone, or a full disk, is none of the server's business."""
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(totals), encoding="utf-8")
            os.replace(new, self._path)
        except OSError:
            return


class CountCollector:
    """Gives the Prometheus client what the files have, when it is scraped."""

    def __init__(self, files: Mapping[Path, Mapping[str, str]]) -> None:
        """files: with the labels of each, all of the same names."""
        self._files = files

    def collect(self) -> Iterable[Any]:
        """All families; of a file that is not there, nothing."""
        from prometheus_client.core import CounterMetricFamily

        names = list(next(iter(self._files.values()), {}))
        found = {
            name: CounterMetricFamily(f"{PREFIX}features_{name}", what, labels=names) for name, what in TOTALS.items()
        }
        dropped = CounterMetricFamily(f"{PREFIX}features_dropped", DROPPED_HELP, labels=[*names, "reason"])
        for path, labels in self._files.items():
            if not path.exists():
                continue
            values = list(labels.values())
            known = dict.fromkeys((*TOTALS, *(DROPPED + reason for reason in REASONS)), 0)
            for name, count in (known | kept_object(path)).items():
                if name.startswith(DROPPED):
                    dropped.add_metric([*values, name.removeprefix(DROPPED)], count)
                elif name in found:
                    found[name].add_metric(values, count)
        return [*found.values(), dropped]
