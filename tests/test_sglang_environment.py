"""Runs tests of the SGLang adapter in the environment of the release before: a group of files per process."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/engines/sglang"
PYTHON = ROOT / ".venv-sglang-before/bin/python"
# The first one in `make test`; the servers of perfect_head are of each kind of head, and one of them is captured.
GROUPS = {
    "contract": ("contract", "contract_models", "selftest_contract", "perfect_head"),
    "greedy": ("tiny",),
    "draws": ("sampling", "seeds"),
    "requests": ("by_request", "grammar", "logprobs", "parameters", "metrics"),
    "heads": ("parallel_heads", "head_exchange"),
    "block drafters": ("block_support", "block_drafters", "markov_drafters"),
    "MTP layers": ("mtp",),
    "models": ("families", "lora", "gpu_adapters", "chunks"),
    "starts": ("selftest", "selftest_start", "refusals", "unsupported_flags"),
    "ranks": ("tensor_parallel", "ranks"),
}
# With a KV pool of their own for sliding windows, plain decoding on a CPU ends in this release (docs/versions.md).
LEFT_OUT = {"models": "gpt_oss"}
SECONDS = 840  # of one process; the limit of a test is 900


@pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no .venv-sglang-before; make it with `make env-sglang-before`"
)
@pytest.mark.parametrize(
    "group",
    [
        pytest.param("contract", marks=(pytest.mark.slow, pytest.mark.server)),
        *(pytest.param(name, marks=pytest.mark.matrix) for name in list(GROUPS)[1:]),
    ],
)
def test_group_in_the_release_before(group: str) -> None:
    files = [str(FOLDER / f"test_{name}.py") for name in GROUPS[group]]
    command = [str(PYTHON), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not matrix", *files]
    command += ["-k", f"not {LEFT_OUT[group]}"] if group in LEFT_OUT else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout[-6000:])  # with -s or -rP
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE) and "skipped" not in done.stdout
