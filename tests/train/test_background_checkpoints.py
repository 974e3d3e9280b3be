"""Checkpoints that are written by a thread, as on a GPU: whole, one at a time, with the values of their update.

The runs are on a CPU, where the trainer writes by itself unless a test changes it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from training_runs import recipe, run_training, weights

from eagle_plugin.learning.train import checkpoint, loop
from eagle_plugin.learning.train.checkpoint import Checkpoint, CheckpointWriter, RunState, load_newest
from eagle_plugin.learning.train.document_order import Position
from eagle_plugin.learning.train.model import Parameters
from eagle_plugin.learning.train.recipe import TrainError


def make(update: int) -> Checkpoint:
    return Checkpoint(RunState(Position(update=update), 1.0, {}, "d"), {"p": torch.full((4,), float(update))}, {})


def update_of(folder: Path) -> int | None:
    found = load_newest(folder)
    return None if found is None else found.state.position.update


def test_one_at_a_time_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, log = threading.Event(), list[str]()
    save, flush = checkpoint.save_checkpoint, checkpoint.flush_to_disk

    def hold(path: Path) -> None:
        assert go.wait(60)
        flush(path)

    def note(folder: Path, made: Checkpoint) -> Path:
        log.append(f"begin {made.state.position.update}")
        path = save(folder, made)
        log.append(f"end {made.state.position.update}")
        return path

    monkeypatch.setattr(checkpoint, "flush_to_disk", hold)
    monkeypatch.setattr(checkpoint, "save_checkpoint", note)
    folder = tmp_path / "checkpoints"
    with CheckpointWriter(folder, background=True) as writer:
        writer.save(make(1))
        writer.wait(only_if_done=True)
        assert update_of(folder) is None and "end 1" not in log  # what a killed process would leave
        go.set()
        for update in (2, 3):
            writer.save(make(update))
    assert log == [f"{what} {update}" for update in (1, 2, 3) for what in ("begin", "end")]
    assert update_of(folder) == 3 and len(list(folder.iterdir())) == 2
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(folder, background=True) as writer:
        writer.save(make(4))
        raise KeyboardInterrupt
    assert update_of(folder) == 4


def test_an_error_is_that_of_a_write_without_a_thread(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    with pytest.raises(TrainError) as wanted:
        CheckpointWriter(folder, background=False).save(make(1))
    ways: list[Any] = [lambda writer: writer.save(make(2)), lambda writer: writer.wait(), lambda _: None]
    for tell in ways:
        with pytest.raises(TrainError) as found, CheckpointWriter(folder, background=True) as writer:
            writer.save(make(1))
            tell(writer)
        assert str(found.value) == str(wanted.value)


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CheckpointWriter", lambda folder, background: CheckpointWriter(folder, not background))


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "control"])
def test_a_checkpoint_has_the_values_of_its_update(
    features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None, copied: bool
) -> None:
    """It is written after the next update."""
    values = recipe(features.target, features.store, budget={"updates": 5}, eval_tokens=0)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "CheckpointWriter", CheckpointWriter)
        whole = run_training(tmp_path, "whole", values)
    later, steps = threading.Event(), 0
    step, save, gather = Parameters.step, checkpoint.save_file, Parameters.gather

    def count(self: Parameters, factor: float) -> Tensor:
        nonlocal steps
        found = step(self, factor)
        steps += 1
        if steps == 4:
            later.set()
        return found

    def save_later(tensors: dict[str, Tensor], path: Path) -> None:
        assert later.wait(60)
        save(tensors, path)

    monkeypatch.setattr(Parameters, "step", count)
    monkeypatch.setattr(checkpoint, "save_file", save_later)
    if not copied:
        monkeypatch.setattr(Parameters, "gather", lambda self, keep, copy=False: gather(self, keep))
    found = run_training(tmp_path, "found", values)
    names = [f"checkpoints/update-00000003/{name}.safetensors" for name in ("parameters", "optimiser")]
    assert weights(found) == weights(whole)
    assert all((found / name).read_bytes() == (whole / name).read_bytes() for name in names) == copied


def test_a_full_disk_ends_the_training_which_goes_on_from_the_checkpoint_before(
    features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: None
) -> None:
    values = recipe(features.target, features.store, budget={"updates": 30}, eval_tokens=0)
    whole = run_training(tmp_path, "whole", values)
    save, step = checkpoint.save_file, Parameters.step
    steps = 0

    def count(self: Parameters, factor: float) -> Tensor:
        nonlocal steps
        steps += 1
        return step(self, factor)

    def fill(tensors: dict[str, Tensor], path: Path) -> None:
        if "00000006" in str(path):
            raise SafetensorError(f"I/O error: {os.strerror(28)}")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fill)
        patch.setattr(Parameters, "step", count)
        with pytest.raises(TrainError, match=r"update-00000006 cannot be written \(.*No space.*make room or correct"):
            run_training(tmp_path, "full", values)
    assert steps <= 9  # the next checkpoint at the latest tells it
    assert [path.name for path in (tmp_path / "full/checkpoints").iterdir()] == ["update-00000003"]
    assert weights(run_training(tmp_path, "full", values)) == weights(whole)
