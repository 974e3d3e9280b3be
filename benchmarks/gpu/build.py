"""Step `build`: the native library is compiled for this device by its own compiler, and one kernel of it runs."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.kernels import loader
from eagle_plugin.kernels.tree import sibling_links


def run(setting: Setting) -> dict[str, Any]:
    """Build (or find the build of the same sources), load and launch; StepError with the compiler's message."""
    if setting.engine is not None:
        need_modules(setting.engine)
    kind = "cuda" if setting.on_gpu else "cpu"
    started = time.perf_counter()
    try:
        file = loader.first_use_build(loader.kernel_library(kind))
    except RuntimeError as error:
        raise StepError(f"the {kind} library cannot be built: {error}") from error
    seconds = time.perf_counter() - started
    if loader.backend(kind) != "native":
        raise StepError(
            f"{file.name} was built but does not load on this machine, the log has the reason: unset EAGLE_KERNELS, or "
            "update the NVIDIA driver"
        )
    parents = torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32, device=setting.device)
    links = [x.tolist() for x in sibling_links(parents)]
    if links != [[[1, 3, -1, -1]], [[-1, 2, -1, -1]]]:
        raise StepError(f"sibling_links gave {links} on {setting.device}, wanted the links of a tree of four nodes")
    return {"library": file.name, "seconds": round(seconds, 1), "bytes": file.stat().st_size}
