"""How many launches and how much host time a decode round of the worker takes, by benchmarks/host_time.py.

On a GPU every torch operation and native kernel of a round is a launch, and launches are what a small batch waits for.
The counts are exact, so a change that adds a launch fails here; times are only checked to be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host_times import check_times, host_times, policy_times

# Per round, outside of the models' forwards; the aims are in benchmarks/host_time.py.
GREEDY_LAUNCHES, SAMPLED_LAUNCHES = 29, 52  # of an eager round
CAPTURED_LAUNCHES, GRAPHS = 12, 4

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return host_times("sglang", tmp_path_factory.mktemp("host-time"))


@pytest.mark.parametrize(("name", "limit"), [("greedy 8", GREEDY_LAUNCHES), ("sampled 8", SAMPLED_LAUNCHES)])
def test_launches(report: dict[str, Any], name: str, limit: int) -> None:
    eager, captured = report["scenarios"][name]["eager"], report["scenarios"][name]["captured"]
    assert 0 < eager["launches"] <= limit and eager["graph_launches"] == 0, eager["launches_by_name"]
    assert captured["launches"] <= CAPTURED_LAUNCHES, captured["launches_by_name"]
    assert captured["graph_launches"] == GRAPHS, captured["graph_launches_by_phase"]


def test_the_kernels_of_a_round_are_counted(report: dict[str, Any]) -> None:
    """A control: counts that miss the native kernels would be small for the wrong reason."""
    names = report["scenarios"]["sampled 8"]["eager"]["launches_by_name"]
    assert {"native grow_level", "native select_tree", "native verify_tree", "native compact_kv"} <= names.keys()
    names = report["scenarios"]["sampled 8"]["captured"]["launches_by_name"]
    assert "native start_round" in names and "native verify_tree" not in names


def test_the_number_of_launches_does_not_grow_with_the_batch(report: dict[str, Any]) -> None:
    """Of one request it may be less: a copy that makes a tensor contiguous has nothing to do there."""
    one, eight = (report["scenarios"][f"greedy {batch}"] for batch in (1, 8))
    assert one["eager"]["launches"] <= eight["eager"]["launches"] <= one["eager"]["launches"] + 4
    assert one["captured"]["launches"] == eight["captured"]["launches"]


def test_times(report: dict[str, Any]) -> None:
    check_times(report)


@pytest.mark.matrix  # a start with the graphs of all shapes; test_graphs.py proves that path sums are replayed
def test_a_policy_launches_its_path_sums_as_one_graph_in_one_of_four_rounds(tmp_path: Path) -> None:
    found = policy_times("sglang", tmp_path)
    auto, fixed = found["auto"], found["fixed"]
    assert auto["launches_by_name"]["graph launch sums"] >= 0.2
    assert auto["graph_launches"] <= fixed["graph_launches"] + 0.4 and auto["launches"] <= fixed["launches"] + 0.4
