"""Steps `server` and `vllm-server`: `eagle-plugin demo` on this GPU, where the engine is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.groups import run_shown
from benchmarks.gpu.model_cases import ANY_KERNELS
from benchmarks.gpu.steps import Setting, StepError, StepSkipped

NAMES = {"sglang": "SGLang", "vllm": "vLLM"}


def run(setting: Setting) -> dict[str, Any]:
    """Compare plain decoding, the engine's EAGLE-3 and the plugin; StepError with the demo's last line."""
    engine = setting.engine or "sglang"
    if not setting.on_gpu:
        raise StepSkipped("the demo of a CPU is `make demo`; here it runs on an NVIDIA GPU only")
    need_modules(engine, "httpx", "pydantic")
    # vLLM on a GPU is served only so; for SGLang it changes nothing in a tested release.
    more = {"EAGLE_PLUGIN": "force"} if engine == "vllm" else ANY_KERNELS
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "eagle_plugin.cli", "demo", "--engine", engine]
        command += ["--device", "cuda", "--out", folder, *(["--quick"] if setting.tiny else [])]
        done = run_shown(command, more)
        report = Path(folder) / ("demo.json" if engine == "sglang" else f"demo-{engine}.json")
        if done.returncode or not report.exists():
            raise StepError(f"the demo ended with {done.returncode}: {(done.stderr.strip() or '?').splitlines()[-1]}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def need_modules(engine: str, *others: str) -> None:
    """StepSkipped where this interpreter lacks the engine or what the bench needs beside it."""
    for module in (engine, *others):
        if importlib.util.find_spec(module) is None:
            raise StepSkipped(
                f"the module {module} is not installed, wanted {NAMES[engine]} and eagle-plugin[bench,models] in the "
                f"environment of {sys.executable}; name another with GPU_PYTHON="
            )
