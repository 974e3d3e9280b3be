"""Draft trees in vLLM's V2 model runner: the tests of interpreted_v2.py, and in the matrix those of the V1 runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_triton import ROOT, run_tests

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
HERE = Path(__file__).parent


def test_trees(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    asked = "matrix" if "not matrix" not in request.config.option.markexpr else "not matrix"
    run_tests([ROOT / "tests/support/interpreted_v2.py", "-m", asked], tmp_path, 850, **V2)
