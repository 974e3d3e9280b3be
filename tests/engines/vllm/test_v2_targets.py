"""Targets with images, states, latent attention or a KV connector in vLLM's V2 model runner: tests of the V1 runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_triton import run_v1_tests


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("multimodal", "pictures_in_prompts"),
        ("linear_attention", "under_other_flags"),
        ("mla", "text_equals"),
        ("kv_connectors", "head_drafts_on"),
    ],
)
@pytest.mark.timeout(1800)
def test_the_tests_of_the_v1_runner(file: str, chosen: str, tmp_path: Path) -> None:
    run_v1_tests(file, chosen, tmp_path)
