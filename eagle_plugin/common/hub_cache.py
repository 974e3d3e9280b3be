"""The name of a model by its folder, also in the cache of the Hugging Face hub, where the folder is named by a hash."""

from __future__ import annotations

from pathlib import Path


def model_name(folder: str | Path) -> str:
    """The last part of a folder's path; NAME for `models--ORG--NAME/snapshots/HASH`."""
    given = Path(folder).absolute()
    path = given if _is_snapshot(given) else given.resolve()
    return path.parent.parent.name.rpartition("--")[2] if _is_snapshot(path) else path.name


def _is_snapshot(path: Path) -> bool:
    return path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
