"""Which kernels of attention are compiled before the first request: the tests of launched_chains.py, with Triton."""

from __future__ import annotations

from pathlib import Path

from interpreted_triton import ROOT, run_tests


def test_what_is_compiled_before_the_first_request(tmp_path: Path) -> None:
    assert "7 passed" in run_tests([ROOT / "tests/support/launched_chains.py"], tmp_path, 300)
