"""Runs test files of vLLM's environment with Triton's interpreter, over .venv-sglang's Triton: its own has none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = Path(__file__).with_name("interpreter")
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The variables of a process that has Triton; folder: empty, for the link to it."""
    (triton,) = ROOT.glob(".venv-sglang/lib/python*/site-packages/triton")
    (folder / "triton").symlink_to(triton)
    # Kernels that torch compiles would want more of Triton.
    interpreted = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    paths = [str(INTERPRETER), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | interpreted | {"PYTHONPATH": os.pathsep.join(paths)} | more


def run_tests(arguments: Sequence[str | Path], folder: Path, seconds: float, **more: str) -> str:
    """What pytest says of these files, which must pass; more: variables."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env=environment(folder, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def run_v1_tests(file: str, chosen: str, folder: Path) -> None:
    """Tests of a file of the V1 runner, chosen as by -k, in the V2 runner."""
    tests = ROOT / f"tests/engines/vllm/test_{file}.py"
    run_tests([tests, "-k", chosen, "-m", "not matrix"], folder, 1700, **V2)
