"""Brings what the policy does from the worker's process to vLLM's Prometheus logger, by one file per engine.

vLLM's statistics have no field for it, and their serialisation drops what is not declared. The worker writes the file
at most once per second, and when a step has no tokens; the metrics read it when they are scraped.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.log import PolicyLog
from eagle_plugin.policy.metrics import families
from eagle_plugin.policy.report import PolicyReport, ReportError
from eagle_plugin.vllm.plugin_config import plugin_config

WRITE_EVERY = 1.0  # seconds

logger = logging.getLogger("vllm.eagle_plugin")
_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when this process ends


def make_report_folder() -> Path:
    """A folder of reports that only this user can read; it is there as long as this process."""
    _folders.append(tempfile.TemporaryDirectory(prefix="eagle-plugin-"))
    return Path(_folders[-1].name)


def report_of(folder: Path, engine: int) -> Path:
    """The report of one engine of a server, by its index of data parallelism."""
    return folder / f"policy-{engine}.json"


def counts_of(folder: Path, engine: int) -> Path:
    """What one engine of a server has written of hidden states (`collect.metrics.CountFile`)."""
    return folder / f"features-{engine}.json"


class PolicyReporter:
    """Writes the report of a worker's policy into its file, and the lines of `PolicyLog`."""

    def __init__(
        self,
        speculative_config: Any,
        chooser: Callable[[], ShapeChooser],
        clock: Callable[[], float] = time.monotonic,
        engine: int = 0,
    ) -> None:
        """chooser: gives the worker's present one; engine: its index of data parallelism. Raises LogSecondsError."""
        config = plugin_config(speculative_config)
        self._path = None if config is None or config.reports is None else report_of(config.reports, engine)
        self._chooser, self._clock = chooser, clock
        self._log = PolicyLog(chooser, logger, clock)
        self._written: float | None = None
        self._rounds_written = 0

    def step(self, has_tokens: bool) -> None:
        """Note a step, in the thread that calls the chooser; vLLM makes one without tokens after the last request."""
        self._log.step()
        now = self._clock()
        if self._path is None or (has_tokens and self._written is not None and now - self._written < WRITE_EVERY):
            return
        rounds = sum(totals.rounds for totals in self._chooser().totals.values())
        if rounds == self._rounds_written:
            return
        self._written, self._rounds_written = now, rounds
        try:
            self._write(self._path)
        except FileNotFoundError:  # the folder goes when the launcher ends
            self._path = None
        except OSError as error:
            logger.warning("eagle-plugin: the policy's metrics stop: %s cannot be written (%s)", self._path, error)
            self._path = None

    def _write(self, path: Path) -> None:
        """Replace the file at once: a reader finds the old report or the new one."""
        new = path.with_suffix(".new")
        new.write_text(self._chooser().report().as_json(), encoding="utf-8")
        os.replace(new, path)


class ReportCollector:
    """Gives the Prometheus client the metrics of the engines' newest reports, when it is scraped."""

    def __init__(self, folder: Path, labels: Mapping[int, Mapping[str, str]]) -> None:
        """labels: the engines' own, by their indices; all of the same names."""
        self._folder, self._labels = folder, labels

    def collect(self) -> Iterable[Any]:
        """All families; without numbers of an engine as long as it has no report."""
        return families([(self._report(engine), labels) for engine, labels in self._labels.items()])

    def _report(self, engine: int) -> PolicyReport | None:
        try:
            return PolicyReport.from_json(report_of(self._folder, engine).read_text(encoding="utf-8"))
        except (OSError, ReportError):
            return None
