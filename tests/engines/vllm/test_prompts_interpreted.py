"""vLLM's own Triton kernel for prompts over our cache: the tests of interpreted_prompts.py, with .venv-sglang's Triton.

vLLM's environment for CPUs has none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.matrix
@pytest.mark.slow
def test_the_engines_kernel_in_the_interpreter(tmp_path: Path) -> None:
    (triton,) = ROOT.glob(".venv-sglang/lib/python*/site-packages/triton")
    (tmp_path / "triton").symlink_to(triton)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/support/interpreted_prompts.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert re.search(r"^9 passed", done.stdout, re.MULTILINE), done.stdout[-5000:]
