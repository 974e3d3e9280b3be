"""Checkpoints of a run: parameters, optimiser and position, written whole or not at all.

    OUT/checkpoints/update-00000200/{parameters.safetensors, optimiser.safetensors, state.json, digests.json}
    OUT/progress.json: the newest update that was in a checkpoint

They do not depend on the number of processes. Random numbers need no state: every update has its own seed.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_plugin.common.atomic_io import flush_to_disk, replace_file
from eagle_plugin.common.file_digests import DIGESTS, find_damage, write_digests
from eagle_plugin.learning.train.document_order import Position
from eagle_plugin.learning.train.recipe import TrainError, changed_keys

KEPT = 2
VERSION = 2  # 1 had no digests.json
PARTIAL = ".partial-"
PROGRESS = "progress.json"
FILES = ("parameters.safetensors", "optimiser.safetensors", "state.json")


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
    damaged: list[str] = field(default_factory=list)  # newer checkpoints that were not used: path and what is wrong


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `folder` and remove all but this one and the one before; returns its path.

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
        write_digests(partial, FILES)
        for file in (*partial.iterdir(), partial):
            flush_to_disk(file)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        flush_to_disk(folder)
        _write_progress(folder.parent, checkpoint.state.position.update)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainError(
            f"{path} cannot be written ({error}); make room or correct the permissions, then run the same command again"
        ) from error
    paths = _list(folder)
    here = paths.index(path)
    # The newer ones are damaged, otherwise the run had continued from there.
    for other in paths[: max(0, here + 1 - KEPT)] + paths[here + 1 :]:
        shutil.rmtree(other, ignore_errors=True)
    return path


class CheckpointWriter:
    """Writes the checkpoints below one folder, one at a time; as a context manager it waits for the last one.

    background: in a thread. The tensors of a checkpoint must then be copies, which nobody changes.
    """

    def __init__(self, folder: Path, background: bool) -> None:
        self._folder, self.background = folder, background
        self._pool = ThreadPoolExecutor(1, "checkpoint-writer") if background else None
        self._pending: Future[Path] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, as `save_checkpoint`; in the background it is on disk after `wait`."""
        self.wait()
        if self._pool is None:
            save_checkpoint(self._folder, checkpoint)
        else:
            self._pending = self._pool.submit(save_checkpoint, self._folder, checkpoint)

    def wait(self, only_if_done: bool = False) -> None:
        """Wait until the last checkpoint is on disk; only_if_done: do not wait, but tell its error if there is one.

        Raises:
            TrainError: it cannot be written.
        """
        if self._pending is not None and (self._pending.done() or not only_if_done):
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._pending is not None:  # also after Ctrl-C: the folder is this run's until nothing writes to it
            wait([self._pending])  # its own error is not told: the other one came first


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint below `folder` whose files are as they were written, or None if there is none at all.

    Raises:
        TrainError: all are damaged, or one is of another version.
    """
    damaged: list[str] = []
    for path in reversed(_list(folder)):
        try:
            found = _load(path)
        except _Damage as damage:
            damaged.append(f"{path} is damaged ({damage})")
            continue
        return replace(found, damaged=damaged)
    if damaged:
        raise TrainError(
            f"{damaged[0]}, and there is no other checkpoint to continue from; "
            "copy it again, or give --restart to train from zero"
        )
    return None


class _Damage(Exception):
    """A checkpoint whose files are not as they were written."""


def _load(path: Path) -> Checkpoint:
    try:
        if (path / DIGESTS).exists() and (problems := find_damage(path)):
            raise _Damage("; ".join(problems))
        values = json.loads((path / "state.json").read_text(encoding="utf-8"))
        version = values["version"]
        if version == VERSION and not (path / DIGESTS).exists():
            raise _Damage(f"{DIGESTS} is missing")
        if version not in (1, VERSION):
            raise TrainError(f"{path} has version {version}, wanted {VERSION}; start again in another folder (--out)")
        state = RunState(**values | {"position": Position(**values["position"])})
        parameters = load_file(path / "parameters.safetensors")
        optimiser = load_file(path / "optimiser.safetensors")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise _Damage(str(error)) from error
    return Checkpoint(state, parameters, optimiser)


def saved_update(out: Path) -> int | None:
    """The newest update of the run in `out` that was in a checkpoint; None without a readable progress.json."""
    try:
        return int(json.loads((out / PROGRESS).read_text(encoding="utf-8"))["update"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _write_progress(out: Path, update: int) -> None:
    with replace_file(out / PROGRESS) as file:
        file.write_text(json.dumps({"update": update}) + "\n", encoding="utf-8")


def check_not_lost(out: Path) -> None:
    """Raise TrainError if the run in `out` has trained and its checkpoints are gone; call it where there is none.

    To begin again without a word would replace its logs and its head.
    """
    update = saved_update(out)
    if update == 0 or update is None and not (out / "head").exists():
        return
    done = "a finished run" if update is None else f"a run that was saved after update {update:,}"
    raise TrainError(
        f"{out} has {done}, and {out / 'checkpoints'} has no checkpoint; copy the checkpoints back, "
        "choose another folder (--out), or give --restart to train from zero and replace this run"
    )


def remove_run(out: Path) -> None:
    """Remove the checkpoints, logs and progress of the run in `out`; its head stays until there is a new one.

    Raises:
        TrainError: they cannot be removed.
    """
    try:
        _write_progress(out, 0)
        for name in ("checkpoints", "logs"):
            if (out / name).exists():
                shutil.rmtree(out / name)
    except OSError as error:
        raise TrainError(
            f"{out} cannot be emptied ({error}); correct the permissions, or choose another --out"
        ) from error


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
