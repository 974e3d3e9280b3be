"""Step `speed`: the times of single kernels, by benchmarks/gpu/kernels.py; on a CPU by benchmarks/kernels.py."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.groups import run_shown
from benchmarks.gpu.steps import Setting, StepError

BENCHMARKS = Path(__file__).resolve().parents[1]
CPU_OPTIONS = ("--contexts", "40", "--nodes", "4", "--dtype", "float32", "--seconds", "0")


def run(setting: Setting) -> dict[str, Any]:
    """Run the benchmark and return its report; StepError with its last line."""
    script = BENCHMARKS / ("gpu/kernels.py" if setting.on_gpu else "kernels.py")
    options: tuple[str, ...] = () if setting.on_gpu else CPU_OPTIONS
    if setting.on_gpu and setting.tiny:
        options = ("--shape", "smollm2-135m", "--batches", "1")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(script), *options, "--json", str(report)]
        try:
            done = run_shown(command)
        finally:
            if report.exists():  # the rows until then, when the step is ended
                setting.keep(json.loads(report.read_text(encoding="utf-8")))
        if done.returncode:
            raise StepError(
                f"{script.name} ended with {done.returncode}: {(done.stderr.strip() or '?').splitlines()[-1]}"
            )
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found
