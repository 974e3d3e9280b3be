"""The tests of the Triton kernels in Triton's interpreter, which must be chosen before Triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

EXAMPLES = "12"  # of a property: the interpreter is slow


# Files, and what `make test` runs of them.
QUICK = {
    # Only 16-bit tiles have a loop without masks: with padded dims, a window, and neither.
    "test_triton_attention": "float32 or bfloat16 and (odd or wide or full) or not test_tree_attention",
    "test_triton_float8": "e4m3fn and bfloat16 or not (test_tree_attention or test_what)",
    "test_gated_delta_trees_kernels": "not large",
}
CHOSEN = " or ".join(f"{file} and ({chosen})" for file, chosen in QUICK.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        pytest.param(list(QUICK), CHOSEN, id="quick"),
        *(pytest.param([file], "", id=file, marks=pytest.mark.matrix) for file in QUICK),
    ],
)
def test_the_triton_tests_pass_in_the_interpreter(files: list[str], chosen: str) -> None:
    paths = [str(Path(__file__).with_name(f"{file}.py")) for file in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *paths],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "EAGLE_TEST_EXAMPLES": EXAMPLES},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
