"""The C++ functions of this distribution: built on first use from csrc/, against the headers of eagle-plugin.

EAGLE_KERNELS and EAGLE_CACHE_DIR mean what eagle_plugin.kernels.loader says, except that nothing is shipped: with
EAGLE_KERNELS=aot the torch path runs. EAGLE_SGLANG_CPU_LIBRARY is the path of a file to load instead (for sanitizers).
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_plugin.kernels import loader

LIBRARY = loader.Library(
    name="eagle_sglang_cpu",
    kind="cpu",
    sources=Path(__file__).resolve().parent / "csrc",
    purpose="functions for SGLang on a CPU",
    override="EAGLE_SGLANG_CPU_LIBRARY",
)


@functools.cache
def function(name: str) -> Callable[..., Any] | None:
    """Return a C++ function of this distribution, None when the torch path is to run."""
    module = loader.open_library(LIBRARY)
    return None if module is None else module.get_function(name)


def backend() -> str:
    """Return what runs: "native" or "torch"."""
    return "torch" if loader.open_library(LIBRARY) is None else "native"
