"""Torchvision for SGLang servers that are to read pictures: .venv-vllm's, since .venv-sglang has its names alone.

Importing it takes seconds, which servers of text need not wait for.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def with_torchvision(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The variables of a server that has it; folder: made, for links to its files."""
    folder.mkdir()
    found = list(ROOT.glob(".venv-vllm/lib/python*/site-packages/torchvision*"))
    assert found, "no .venv-vllm with torchvision; make it with `make env-vllm`"
    for path in found:
        (folder / path.name).symlink_to(path)
    paths = [str(folder), environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
