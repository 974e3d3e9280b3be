"""Runs tests/vllm_environment, which compares our heads with vLLM's own classes, in the environment that has vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from eagle_plugin.models.store import get_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
FOLDER = "tests/vllm_environment"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")


def run_tests(selection: str) -> None:
    command = [str(PYTHON), "-m", "pytest", "-q", "-m", selection, "-p", "no:cacheprovider", FOLDER]
    # Not the paths of this environment, which hold another transformers.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_heads_in_vllms_classes() -> None:
    run_tests("not server")


@pytest.mark.server
def test_head_in_vllms_engine() -> None:
    get_model("smollm2-135m-instruct")  # vLLM's environment cannot download it
    run_tests("server")
