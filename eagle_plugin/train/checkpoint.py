"""Checkpoints of a run: parameters, optimiser and position, written whole or not at all.

    OUT/checkpoints/update-00000200/{parameters.safetensors, optimiser.safetensors, state.json}

They do not depend on the number of processes. Random numbers need no state: every update has its own seed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_plugin.atomic_io import flush_to_disk
from eagle_plugin.train.document_order import Position
from eagle_plugin.train.recipe import TrainError, changed_keys

KEPT = 2
VERSION = 1
PARTIAL = ".partial-"


@dataclass(frozen=True)
class RunState:
    """Everything but the tensors; the keys of state.json."""

    position: Position
    seconds: float  # spent on the run so far
    recipe: dict[str, Any]
    documents: str  # digest of the documents that the order was made from
    version: int = VERSION


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, on the CPU."""

    state: RunState
    parameters: dict[str, Tensor]  # float32, by parameter name
    optimiser: dict[str, Tensor]  # by parameter name, "/" and the optimiser's own name


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `folder` and remove all but the newest two; returns its path.

    Raises:
        TrainError: the disk is full or not writable; what was there stays.
    """
    path = folder / f"update-{checkpoint.state.position.update:08d}"
    partial = folder / f"{PARTIAL}{path.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(checkpoint.parameters, partial / "parameters.safetensors")
        save_file(checkpoint.optimiser, partial / "optimiser.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(checkpoint.state), indent=1), encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            flush_to_disk(file)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        flush_to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainError(
            f"{path} cannot be written ({error}); make room or correct the permissions, then run the same command again"
        ) from error
    for old in _list(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint below `folder`, or None.

    Raises:
        TrainError: it cannot be read.
    """
    paths = _list(folder)
    if not paths:
        return None
    try:
        values = json.loads((paths[-1] / "state.json").read_text(encoding="utf-8"))
        if values["version"] != VERSION:
            raise TrainError(
                f"{paths[-1]} has version {values['version']}, wanted {VERSION}; start again in another folder (--out)"
            )
        state = RunState(**values | {"position": Position(**values["position"])})
        parameters = load_file(paths[-1] / "parameters.safetensors")
        optimiser = load_file(paths[-1] / "optimiser.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TrainError(f"{paths[-1]} is damaged ({error}); delete it to go on from the checkpoint before") from error
    return Checkpoint(state, parameters, optimiser)


def check_same_run(found: RunState, recipe: dict[str, Any], documents: str, folder: Path) -> None:
    """Raise TrainError unless a checkpoint was made by the same recipe from the same documents."""
    if changed := changed_keys(found.recipe, recipe):
        raise TrainError(
            f"{folder} holds a run with another recipe ({'; '.join(changed)}); "
            "give its recipe back to go on with it, or another folder (--out)"
        )
    if found.documents != documents:
        raise TrainError(
            f"{folder} holds a run over other documents than the recipe's data has now; "
            "give the data as it was to go on with it, or another folder (--out)"
        )


def _list(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("update-*") if path.is_dir())
