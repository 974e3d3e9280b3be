"""Requests and ranks in vLLM's V2 model runner: tests of the V1 runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_triton import run_v1_tests


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("prefix_drafts", ""),
        ("features", "reference and not shift"),
        ("tensor_parallel", "text_of_two_ranks or walked_alike"),
        ("grammar", "not fewer_rounds and not noticed"),  # which replace methods of the V1 runner
        ("lora", "text_of_adapters"),
        ("prompt_embeds", ""),
    ],
)
@pytest.mark.timeout(1800)
def test_the_tests_of_the_v1_runner(file: str, chosen: str, tmp_path: Path) -> None:
    run_v1_tests(file, chosen, tmp_path)
