"""Step `server`: `eagle-plugin demo` on this GPU, where SGLang is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import Setting, StepError, StepSkipped

ROOT = Path(__file__).resolve().parents[2]


def run(setting: Setting) -> dict[str, Any]:
    """Compare plain decoding, the engine's EAGLE-3 and the plugin; StepError with the demo's last line."""
    if not setting.on_gpu:
        raise StepSkipped("the demo of a CPU is `make demo`; here it runs on an NVIDIA GPU only")
    for module in ("sglang", "httpx", "pydantic"):
        if importlib.util.find_spec(module) is None:
            raise StepSkipped(f"the module {module} is not installed, wanted SGLang and eagle-plugin[bench,models]")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "eagle_plugin.cli", "demo", "--device", "cuda", "--out", folder]
        done = subprocess.run(
            [*command, *(["--quick"] if setting.tiny else [])], cwd=ROOT, text=True, capture_output=True
        )
        print(done.stdout, done.stderr)
        report = Path(folder) / "demo.json"
        if done.returncode or not report.exists():
            raise StepError(f"the demo ended with {done.returncode}: {(done.stderr.strip() or '?').splitlines()[-1]}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found
