"""How many launches and how much host time a decode step of the runner takes, by benchmarks/host_time.py.

On a GPU every torch operation and native kernel of a step is a launch, and launches are what a small batch waits for.
The counts of ours are exact, so a change that adds a launch fails here; vLLM's own are in the report.
"""

from __future__ import annotations

from typing import Any

import pytest
from host_times import check_times, host_times

# Of the plugin per step, outside of the models' forwards.
GREEDY_LAUNCHES, SAMPLED_LAUNCHES = 53, 76  # of an eager step
GREEDY_CAPTURED, SAMPLED_CAPTURED = 13, 25
GRAPHS = {"walk": 1, "extend": 1, "draft": 1, "preparation": 1, "rest": 0}  # the preparation's is vLLM's, of the target


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return host_times("vllm", tmp_path_factory.mktemp("host-time"))


@pytest.mark.parametrize(
    ("name", "eager_limit", "captured_limit"),
    [("greedy 8", GREEDY_LAUNCHES, GREEDY_CAPTURED), ("sampled 8", SAMPLED_LAUNCHES, SAMPLED_CAPTURED)],
)
def test_launches(report: dict[str, Any], name: str, eager_limit: int, captured_limit: int) -> None:
    eager, captured = report["scenarios"][name]["eager"], report["scenarios"][name]["captured"]
    assert 0 < eager["launches"] <= eager_limit and eager["graph_launches"] == 0, eager["launches_by_name"]
    assert captured["launches"] <= captured_limit, captured["launches_by_name"]
    assert captured["graph_launches_by_phase"] == GRAPHS


def test_the_kernels_of_a_step_are_counted(report: dict[str, Any]) -> None:
    """A control: counts that miss the native kernels would be small for the wrong reason."""
    eager, captured = (report["scenarios"]["sampled 8"][kind] for kind in ("eager", "captured"))
    assert {"native grow_level", "native select_tree", "native verify_tree"} <= eager["launches_by_name"].keys()
    assert "native verify_tree" not in captured["launches_by_name"]
    assert eager["engine_launches"] > 0 and captured["engine_launches"] > 0


def test_the_number_of_launches_does_not_grow_with_the_batch(report: dict[str, Any]) -> None:
    """Of one request it may be less: a copy that makes a tensor contiguous has nothing to do there."""
    one, eight = (report["scenarios"][f"greedy {batch}"] for batch in (1, 8))
    assert one["eager"]["launches"] <= eight["eager"]["launches"] <= one["eager"]["launches"] + 4
    assert one["captured"]["launches"] <= eight["captured"]["launches"] <= one["captured"]["launches"] + 4


def test_times(report: dict[str, Any]) -> None:
    check_times(report)
