"""The tests of the Triton kernels in Triton's interpreter, which must be chosen before Triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

EXAMPLES = "12"  # of a property: the interpreter is slow


MATRIX = pytest.mark.matrix
CASES = [
    # Only 16-bit tiles have a loop without masks: with padded dims, a window, and neither.
    ("attention", "float32 or bfloat16 and (odd or wide or full) or not test_tree_attention"),
    pytest.param("attention", "", marks=MATRIX),
    ("float8", "e4m3fn and bfloat16 or not (test_tree_attention or test_what)"),
    pytest.param("float8", "", marks=MATRIX),
    ("gated_delta", "not large"),
    pytest.param("gated_delta", "", marks=MATRIX),
]
FILES = {name: f"test_triton_{name}.py" for name in ("attention", "float8")}
FILES["gated_delta"] = "test_gated_delta_trees_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "chosen"), CASES)
def test_the_triton_tests_pass_in_the_interpreter(kernels: str, chosen: str) -> None:
    file = Path(__file__).with_name(FILES[kernels])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "EAGLE_TEST_EXAMPLES": EXAMPLES},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
