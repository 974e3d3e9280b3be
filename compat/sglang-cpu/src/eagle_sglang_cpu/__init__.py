"""Entry point that lets stock SGLang serve on a CPU without AMX, with no extra flag."""

import os
import sys

from eagle_sglang_cpu.conflicts import conflict_message


def register() -> None:
    """Register the hooks of this package where SGLang's CPU engine runs without AMX kernels; else do nothing.

    Exits with one sentence when a package that owns `sgl_kernel` is installed.
    """
    message = conflict_message()
    if message:
        # SGLang logs and drops any Exception of a plugin; serving on with the wrong kernels would be worse.
        sys.exit(f"error: {message}")
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":  # what SGLang itself takes for "this is the CPU engine"
        return
    from sglang.srt.utils.common import cpu_has_amx_support, is_cpu

    if not is_cpu() or cpu_has_amx_support():
        return
    from eagle_sglang_cpu import adapters, hooks

    hooks.register()
    adapters.register()
