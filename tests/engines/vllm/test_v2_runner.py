"""Draft trees in vLLM's V2 model runner: the tests of interpreted_v2.py, and some of the V1 runner's."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_triton import ROOT, run_tests

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


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
        ("prefix_drafts", ""),
        ("features", "reference and not shift"),
        ("tensor_parallel", "text_of_two_ranks or walked_alike"),
        ("grammar", "not fewer_rounds and not noticed"),  # which replace methods of the V1 runner
        ("lora", "text_of_adapters"),
        ("multimodal", "pictures_in_prompts or pictures_and_gated"),
        ("linear_attention", "under_other_flags or deep_paths"),
        ("mla", "text_equals"),
        ("kv_connectors", "head_drafts_on"),
    ],
)
@pytest.mark.timeout(1800)
def test_the_tests_of_the_v1_runner(file: str, chosen: str, tmp_path: Path) -> None:
    tests = ROOT / f"tests/engines/vllm/test_{file}.py"
    run_tests([tests, "-k", chosen, "-m", "not matrix"], tmp_path, 1700, **V2)
