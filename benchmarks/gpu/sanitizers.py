"""Step `sanitizers`: compute-sanitizer on the kernels that write where values say: memcheck and racecheck."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.gpu.kernel_tests import run_pytest
from benchmarks.gpu.steps import Setting, StepSkipped

TOOLS = ("memcheck", "racecheck")
TESTS = {
    "kv": ("test_compact_kv",),
    "sampling": ("test_walks_are_the_oracles",),
    "tree": ("test_levels_and_selection", "test_topk_log_softmax"),
}
EXAMPLES = 5  # a sanitizer makes a kernel up to a hundred times slower
FAULT = 99  # the exit code that the tool is told to end with when it finds something


def run(setting: Setting) -> dict[str, Any]:
    """Run the kernels' tests under each tool; StepError when a test fails or the tool finds something."""
    tool = shutil.which("compute-sanitizer")
    if not setting.on_gpu or tool is None:
        raise StepSkipped("compute-sanitizer checks CUDA kernels, wanted it on PATH (CUDA toolkit) and --device cuda")
    found = {}
    for name in TOOLS:
        # Triton and torch allocate and compile through children, which are not ours to check.
        before = [tool, "--tool", name, "--error-exitcode", str(FAULT), "--target-processes", "application-only"]
        found[name] = run_pytest(setting, TESTS, EXAMPLES, before)
    return found
