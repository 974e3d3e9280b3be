"""Lets torchvision's CUDA build, the only one on PyPI, be imported beside a CPU build of torch.

vLLM imports torchvision with every multimodal class, for transforms of images, which are Python. The compiled operators
of that build cannot be loaded without CUDA's libraries, and then `import torchvision` fails where it describes two of
them. torch calls `declare` at the end of its own import (entry point "torch.backends").
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_library = None  # must live as long as the operators


def declare() -> None:
    """Declare the two operators, without a kernel, where torchvision is a CUDA build and torch is not."""
    global _library
    import torch

    found = importlib.util.find_spec("torchvision")
    if torch.version.cuda or found is None or found.origin is None:
        return
    if "+cu" not in (Path(found.origin).parent / "version.py").read_text():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
