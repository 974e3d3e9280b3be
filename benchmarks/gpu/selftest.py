"""Step `vllm-selftest`: part 1 of the self-test, in a process of its own beside the engine."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.gpu.groups import run_shown
from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError

TINY = "heads=4,kv_heads=2,head_dim=64,vocabulary=1000,draft_vocabulary=500"


def run(setting: Setting) -> dict[str, Any]:
    """Test the kernels on the shapes of Llama-3.1-8B; StepError with what differs."""
    need_modules(setting.engine or "vllm")
    command = [sys.executable, "-m", "eagle_plugin.cli", "selftest", "--json", "--device", setting.device]
    command += ["--model-shape", TINY] if setting.tiny else []
    done = run_shown(command)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or "?").splitlines()[-1]
        raise StepError(f"the self-test ended with {done.returncode}: {last}") from None
    if not found["passed"]:
        raise StepError(f"the self-test failed: {'; '.join(found['reasons'])}")
    return found
