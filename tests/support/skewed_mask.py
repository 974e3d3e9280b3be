"""A plugin for the test server: verified trees see wrong ancestors. The kernels are right, the real round is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle_plugin.kernels import loader


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from eagle_plugin.kernels import attention

    healthy = attention.tree_attention

    def skewed(*arguments: Any, **options: Any) -> Tensor:
        *others, ancestors = arguments
        return healthy(*others, ancestors << 1 | 1 if ancestors.shape[1] > 4 else ancestors, **options)

    # Before the adapter imports it; the self-test of the kernels gets the healthy one back.
    attention.tree_attention = skewed
    import eagle_plugin.sglang.attention  # noqa: F401

    attention.tree_attention = healthy


def install(folder: Path, entry: str = "skewed_mask:register") -> dict[str, str]:
    """Write the entry point into `folder` and make a cache there, in which the record of the fault stays; returns the
    environment of the server.

    entry: of this fault, or of another one.
    """
    info = folder / "skewed_mask-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skewed-mask\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nskewed = {entry}\n")
    (folder / "cache").mkdir()
    loader.cache_dir().mkdir(parents=True, exist_ok=True)
    (folder / "cache/kernels").symlink_to(loader.cache_dir().resolve())
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "EAGLE_CACHE_DIR": str(folder / "cache"),
        "EAGLE_SELFTEST": "1",
    }
