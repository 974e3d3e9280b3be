"""The tests of the Triton kernels in Triton's interpreter, which must be chosen before Triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    "selection",
    [
        # Only 16-bit tiles have a loop without masks: with padded dims, a window, and neither.
        pytest.param(
            ["-k", "float32 or bfloat16 and (odd or wide or full) or not test_tree_attention"], id="float32 and some"
        ),
        pytest.param([], id="every dtype", marks=pytest.mark.matrix),
    ],
)
def test_the_triton_tests_pass_in_the_interpreter(selection: list[str]) -> None:
    run("test_triton_attention.py", *selection)


@pytest.mark.slow
@pytest.mark.parametrize(
    "selection",
    [
        pytest.param(["-k", "e4m3fn and bfloat16 or not (test_tree_attention or test_what)"], id="some"),
        pytest.param([], id="every dtype", marks=pytest.mark.matrix),
    ],
)
def test_caches_of_8_bit_floats_in_the_interpreter(selection: list[str]) -> None:
    run("test_triton_float8.py", *selection)


def run(file: str, *selection: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name(file))],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
