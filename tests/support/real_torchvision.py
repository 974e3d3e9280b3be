"""Torchvision for SGLang servers that are to read pictures: .venv-vllm's, since .venv-sglang has its names alone.

Importing it takes seconds, which servers of text need not wait for.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def link_torchvision(folder: Path) -> str:
    """Make the folder, with links to its files: a folder of modules that come before SGLang's."""
    folder.mkdir()
    found = list(ROOT.glob(".venv-vllm/lib/python*/site-packages/torchvision*"))
    assert found, "no .venv-vllm with torchvision; make it with `make env-vllm`"
    for path in found:
        (folder / path.name).symlink_to(path)
    return str(folder)
