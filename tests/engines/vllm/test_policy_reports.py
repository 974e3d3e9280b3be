"""The files in which the workers of vLLM report what their policies do: when they are written, and what is shown."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from log_lines import Lines
from prometheus_client import CollectorRegistry

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import CostModel, Costs, Curve, Forward
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.report import PolicyReport
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.vllm.plugin_config import PluginConfig, set_plugin_config
from eagle_plugin.vllm.policy_reports import PolicyReporter, ReportCollector, make_report_folder, report_of

CAPS = Shape(2, 2, 4)
FORWARD = Forward(Curve.of([(1, 0.01), (64, 0.02)]))


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A chooser whose rounds are reported into a file."""

    def __init__(self, folder: Path | None, engine: int = 0) -> None:
        self.config = SimpleNamespace()
        if folder is not None:
            set_plugin_config(self.config, PluginConfig(CAPS, folder))
        self.clock = Clock()
        self.chooser = ShapeChooser(CAPS, Policy(CAPS, CostModel(Costs(FORWARD, FORWARD, FORWARD))))
        self.reporter = PolicyReporter(self.config, lambda: self.chooser, self.clock, engine)

    def step(self, seconds: float, rounds: int = 1, has_tokens: bool = True) -> None:
        self.clock.now += seconds
        if rounds:
            self.chooser.choose(rounds, 100)
            self.chooser.observe(ServedRound(CAPS, rounds, 100), [1] * rounds)
        self.reporter.step(has_tokens)


def value(folder: Path, name: str, engine: int = 0, **labels: str) -> float | None:
    """What a server of two engines shows of one."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(folder, {number: {"engine": str(number)} for number in range(2)}))
    return registry.get_sample_value(f"eagle_plugin:{name}", {"engine": str(engine)} | labels)


def rounds(folder: Path, engine: int = 0) -> float | None:
    return value(folder, "shape_rounds_total", engine, shape="2/2/4")


def test_the_folder_is_private() -> None:
    folder, other = make_report_folder(), make_report_folder()
    assert folder != other and not list(folder.iterdir())
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_it_is_written_once_per_second_and_at_the_end(tmp_path: Path) -> None:
    path = report_of(tmp_path, 0)
    worker = Worker(tmp_path)
    worker.step(0.0, rounds=0)
    assert not path.exists() and rounds(tmp_path) is None
    worker.step(0.1, rounds=2)
    assert rounds(tmp_path) == 2
    worker.step(0.5, rounds=2)
    assert rounds(tmp_path) == 2  # too early
    worker.step(0.6, rounds=2)
    assert rounds(tmp_path) == 6
    worker.step(0.1, rounds=3)
    worker.step(0.0, rounds=0, has_tokens=False)  # no request is left
    assert rounds(tmp_path) == 9 and value(tmp_path, "policy_requests") == 3
    written = path.stat().st_mtime_ns
    worker.step(5.0, rounds=0, has_tokens=False)  # nothing new
    assert path.stat().st_mtime_ns == written and [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert PolicyReport.from_json(path.read_text()).totals == worker.chooser.totals


def test_engines_of_one_server_write_reports_of_their_own(tmp_path: Path) -> None:
    for engine, count in ((0, 2), (1, 5)):
        Worker(tmp_path, engine).step(1.0, rounds=count)
    assert [rounds(tmp_path, engine) for engine in range(2)] == [2, 5]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Worker(None).step(1.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("folder", "warnings"), [("gone", 0), ("a file", 1)])
def test_a_file_that_cannot_be_written_ends_the_reports(
    folder: str, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Silently where the folder is gone, as it is when the server ends."""
    if warnings:
        (tmp_path / "a file").write_text("")
    logger, lines = logging.getLogger("vllm.eagle_plugin"), Lines()
    logger.addHandler(lines)
    caplog.set_level(logging.WARNING, logger.name)  # an engine before this test set another one
    try:
        worker = Worker(tmp_path / folder)
        worker.step(1.0)
        worker.step(5.0)
    finally:
        logger.removeHandler(lines)
    assert len(lines.logged) == warnings and all("policy's metrics stop" in line for line in lines.logged)


@pytest.mark.parametrize("text", ["", "{", '{"version": 99}'])
def test_what_cannot_be_read_has_no_values(text: str, tmp_path: Path) -> None:
    report_of(tmp_path, 0).write_text(text)
    collected: list[Any] = list(ReportCollector(tmp_path, {0: {}}).collect())
    assert collected and not any(family.samples for family in collected)
