"""Runs the tests that need vLLM in the environment that has it: a group of files a process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from eagle_plugin.models.store import get_model

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm/bin/python"
FOLDERS = (ROOT / "tests/engines/vllm", ROOT / "tests/heads")
GROUPS = {
    "heads": ("vllm_round_trip", "vllm_targets"),
    "adapter": ("attention", "batch", "contract", "filters", "metrics", "options", "sampling_contract", "support"),
    "greedy": ("greedy", "greedy_scheduling", "windows"),
    "requests": ("greedy_requests",),
    "sampling": ("sampling_law", "sampling_nodes", "sampling_thinking", "seeds"),
    "parameters": ("grammar", "logprobs", "lora", "parameters"),
}
ON_A_REAL_MODEL = ("serving",)
FILES = {
    path.stem.removeprefix("test_"): path
    for path in [*FOLDERS[0].glob("test_*.py"), *FOLDERS[1].glob("test_vllm_*.py")]
}
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")


def run_tests(names: tuple[str, ...], selection: str) -> None:
    files = [str(FILES[name]) for name in names]
    command = [str(PYTHON), "-m", "pytest", "-q", "-m", selection, "-p", "no:cacheprovider", *files]
    # Not the paths of this environment, which hold another transformers.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_every_file_is_in_a_group() -> None:
    named = [name for names in GROUPS.values() for name in names] + ["serving"]
    assert sorted(named) == sorted(FILES)


@needs_vllm
@pytest.mark.parametrize("group", GROUPS)
def test_group(group: str) -> None:
    run_tests(GROUPS[group], "not server")


@needs_vllm
@pytest.mark.server
def test_on_a_real_model() -> None:
    get_model("smollm2-135m-instruct")
    run_tests(ON_A_REAL_MODEL, "server")
