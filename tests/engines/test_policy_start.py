"""The policy of a starting server: costs from disk or measured, and what its log says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_lines import Lines

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.costs import Costs, Curve, Forward
from eagle_plugin.runtime import cost_files
from eagle_plugin.runtime.policy_start import start_policy

CAPS = Shape(3, 4, 12)
KEY = {"engine": "one", "threads": 2}
# Rows are free up to about eight of them; each further one costs as much as a whole forward of one.
COSTS = Costs(
    Forward(Curve.of([(1, 1.0), (8, 1.01), (1000, 1000.0)])),
    Forward(Curve.of([(1, 0.01), (1000, 10.0)])),
    Forward(Curve.of([(1, 0.01), (1000, 10.0)])),
)
logger = logging.getLogger("tests.policy_start")


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cost_files, "folder", lambda: tmp_path / "cache" / "costs")
    return tmp_path / "cache" / "costs"


class Machine:
    """Counts how often costs are measured on it."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self) -> Costs:
        self.measured += 1
        return COSTS

    def start(self, **key: Any) -> Costs:
        return start_policy(CAPS, KEY | key, self, logger).costs.costs


def test_costs_are_measured_once(lines: Lines) -> None:
    machine = Machine()
    assert [machine.start() for _ in range(3)] == [COSTS] * 3 and machine.measured == 1
    assert machine.start(threads=4) == COSTS and machine.measured == 2
    first, second, third, fourth = lines.logged
    assert first.startswith("eagle-plugin: measured the costs of a round in 0.0 s; of a typical head the policy ")
    assert second == third and "the costs of a round were measured at an earlier start; of a " in second
    assert fourth == first and " for 1, " in first and first.endswith(" for 32 requests")


def test_a_damaged_file_is_told_measured_again_and_replaced(lines: Lines, folder: Path) -> None:
    machine = Machine()
    machine.start()
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(whole[:40])
    machine.start()
    assert machine.measured == 2 and path.read_text() == whole
    told = [line for line in lines.logged if str(path) in line]
    assert len(told) == 1 and told[0].startswith("eagle-plugin: ") and told[0].endswith("measured again")


def test_a_folder_that_cannot_be_written_is_told_and_the_server_starts(lines: Lines, folder: Path) -> None:
    folder.parent.write_text("a file")
    machine = Machine()
    assert machine.start() == COSTS
    assert sum("every start will measure them: cannot write" in line for line in lines.logged) == 1


def test_costs_of_a_busy_machine_are_measured_again() -> None:
    machine = Machine()
    for is_faster, measured in ((True, 1), (False, 1), (True, 2)):
        start_policy(CAPS, KEY, machine, logger, is_faster_than=lambda costs, answer=is_faster: answer)
        assert machine.measured == measured


def test_all_ranks_take_the_costs_of_rank_0(lines: Lines) -> None:
    """Also where only one of them has kept none."""
    slower = COSTS._replace(fixed=1.0)

    def gather(value: Any) -> list[Any]:
        return [slower if isinstance(value, Costs) else value, value]

    assert start_policy(CAPS, KEY, Machine(), logger, gather=gather).costs.costs == slower
    assert start_policy(CAPS, KEY, Machine(), logger, gather=gather).costs.costs == slower
    machine = Machine()
    start_policy(CAPS, KEY, machine, logger, gather=lambda value: [value, None])
    assert machine.measured == 1
