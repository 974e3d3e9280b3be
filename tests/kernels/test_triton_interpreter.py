"""The tests of the Triton kernels in Triton's interpreter, which must be chosen before Triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

EXAMPLES = "12"  # of a property: the interpreter is slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "files"),
    [
        # Only 16-bit tiles have a loop without masks: with padded dims, a window, and neither.
        pytest.param(
            ["-k", "float32 or bfloat16 and (odd or wide or full) or not test_tree_attention"],
            ["test_triton_attention.py"],
            id="float32 and some",
        ),
        pytest.param([], ["test_triton_attention.py"], id="every dtype", marks=pytest.mark.matrix),
        pytest.param(["-k", "not large"], ["test_gated_delta_kernels.py"], id="gated delta nets"),
        pytest.param([], ["test_gated_delta_kernels.py"], id="large gated delta nets", marks=pytest.mark.matrix),
    ],
)
def test_the_triton_tests_pass_in_the_interpreter(selection: list[str], files: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    done = subprocess.run(
        [*command, *(str(Path(__file__).with_name(name)) for name in files)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "EAGLE_TEST_EXAMPLES": EXAMPLES},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
