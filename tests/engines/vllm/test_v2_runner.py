"""Draft trees in vLLM's V2 model runner: the tests of interpreted_v2.py, and some of the V1 runner's."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_triton import ROOT, V2, run_tests, run_v1_tests


def selection(request: pytest.FixtureRequest) -> list[str]:
    """Without the tests of `make test-matrix` where those were not asked for."""
    return ["-m", "not matrix"] if "not matrix" in request.config.option.markexpr else []


def test_trees(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_tests([ROOT / "tests/support/interpreted_v2.py", *selection(request)], tmp_path, 1700, **V2)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_requests_with_different_drafts(tmp_path: Path) -> None:
    tests = ROOT / "tests/engines/vllm/test_by_request.py"
    assert "2 passed" in run_tests([tests, "-k", "mixed and not policy and not once"], tmp_path, 1700, **V2)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("greedy", ""),
        ("greedy_scheduling", ""),
    ],
)
@pytest.mark.timeout(1800)
def test_the_tests_of_the_v1_runner(file: str, chosen: str, tmp_path: Path) -> None:
    run_v1_tests(file, chosen, tmp_path)
