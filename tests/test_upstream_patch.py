"""The patch of docs/patches, which opens vLLM's V2 runner for trees: it applies, and its kernel follows the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs/patches/vllm-0.32.0-trees.patch"
PYTHON = ROOT / ".venv-vllm/bin/python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`")


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the patched files, and Triton, which vLLM's environment for CPUs has not."""
    folder = tmp_path_factory.mktemp("patched")
    (packages,) = ROOT.glob(".venv-vllm/lib/python*/site-packages")
    for name in re.findall(r"^--- a/(.+)$", PATCH.read_text(), re.MULTILINE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(packages / name, folder / name)
    command = ["git", "apply", "--unidiff-zero", "--verbose", str(PATCH)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "offset" not in done.stderr, done.stderr
    return folder


def test_every_file_is_python(patched: Path) -> None:
    files = list(patched.rglob("*.py"))
    assert len(files) == 5
    for file in files:
        compile(file.read_text(), file.name, "exec")
    runner = next(file for file in files if file.name == "model_runner.py").read_text()
    assert runner.count("self._make_speculator()") == runner.count("def _make_speculator(self)") == 1
    assert runner.index(".observe_sampled(") < runner.rindex("self.speculator.propose(")


@pytest.mark.slow
def test_penalties_follow_the_path_of_a_node(patched: Path, tmp_path: Path) -> None:
    (triton,) = ROOT.glob(".venv-sglang/lib/python*/site-packages/triton")
    (tmp_path / "triton").symlink_to(triton)
    (file,) = patched.rglob("penalties.py")
    done = subprocess.run(
        [PYTHON, ROOT / "tests/support/patched_penalties.py", file],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stdout[-2000:] + done.stderr[-3000:]
