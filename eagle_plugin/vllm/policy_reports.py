"""Brings what the policy does from the worker's process to vLLM's Prometheus logger, by a file of the machine.

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


def make_report_path() -> Path:
    """The path of a report that only this user can read; its folder is there as long as this process."""
    _folders.append(tempfile.TemporaryDirectory(prefix="eagle-plugin-"))
    return Path(_folders[-1].name) / "policy.json"


class PolicyReporter:
    """Writes the report of a worker's policy into its file, and the lines of `PolicyLog`."""

    def __init__(
        self,
        speculative_config: Any,
        chooser: Callable[[], ShapeChooser],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """chooser: gives the worker's present one. Raises LogSecondsError."""
        config = plugin_config(speculative_config)
        self._path = None if config is None else config.report
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
    """Gives the Prometheus client the metrics of the newest report, when it is scraped."""

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        """labels: the engine's own."""
        self._path, self._labels = path, labels

    def collect(self) -> Iterable[Any]:
        """All families; without numbers as long as there is no report."""
        try:
            report = PolicyReport.from_json(self._path.read_text(encoding="utf-8"))
        except (OSError, ReportError):
            report = None
        return families(report, self._labels)
