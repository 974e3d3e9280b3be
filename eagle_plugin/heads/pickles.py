"""Heads whose weights are pickles, which can run code: the plugin opens none of them, the engines' loaders do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path


def pickles_of(folder: str | Path) -> list[str]:
    """The names of the pickles of a folder on this disk that has no safetensors; [] if there are no such."""
    folder = Path(folder)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return []
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt"))


def unchecked(folder: str | Path, pickles: list[str]) -> str:
    """The warning about a head that an engine loads from these files."""
    return (
        f"{folder} has only {', '.join(pickles)}: the engine loads the draft head, and the plugin has not looked at "
        f"its weights; the conversion to model.safetensors, which runs no code of theirs: {conversion(folder, pickles)}"
    )


def conversion(folder: str | Path, pickles: list[str]) -> str:
    """A shell command that writes the tensors of these files to model.safetensors and runs no code of theirs."""
    code = (
        f"import safetensors.torch as s, torch; s.save_file({{k: v.clone() for f in {json.dumps(pickles)} for k, v in "
        'torch.load(f, "cpu", weights_only=True).items()}, "model.safetensors")'
    )
    return f"cd {shlex.quote(str(folder))} && python -c {shlex.quote(code)}"
