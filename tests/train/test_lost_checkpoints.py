"""Checkpoints that are damaged or gone: an older one is used, or the run stops; never without a word."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_runs import newest, recipe, run_training, weights

from eagle_plugin.learning.train import command, loop
from eagle_plugin.learning.train.checkpoint import load_newest
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.recipe import TrainError


@pytest.fixture(scope="module")
def trained(features, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 6 updates, with checkpoints after 3 and 6."""
    return run_training(tmp_path_factory.mktemp("trained"), "run", recipe(features.target, features.store))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def train(trained: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The command over the copy; returns what it shows on stderr, on one line."""

    def train(*more: str) -> str:
        capsys.readouterr()
        assert command.main([str(trained.with_suffix(".yaml")), "--out", str(run), *more]) == 0
        return " ".join(capsys.readouterr().err.split())

    return train


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["parameters.safetensors", "optimiser.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    trained: Path, run: Path, train: Callable[..., str], file: str
) -> None:
    shutil.rmtree(run / "head")
    flip(newest(run, file), -5)
    shown = train()
    assert f"warning: {run}/checkpoints/update-00000006 is damaged ({file} does not have its sha256)" in shown
    assert "continuing after update 3" in shown and "up to update 6 were written and are gone or damaged" in shown
    assert weights(run) == weights(trained)  # the updates after it were made again
    for name in ("parameters.safetensors", "optimiser.safetensors"):
        assert newest(run, name).read_bytes() == newest(trained, name).read_bytes()
    assert (left := load_newest(run / "checkpoints")) is not None and left.damaged == []


@pytest.mark.parametrize(
    ("file", "harm", "wanted"),
    [
        ("state.json", lambda path: flip(path, path.read_text().index('"done": ') + 8), "state.json does not have"),
        ("digests.json", lambda path: flip(path, path.read_text().index('"sha256": "') + 12), "not have its sha256"),
        ("digests.json", lambda path: path.write_text("{"), "digests.json cannot be read"),
        ("digests.json", lambda path: path.write_text("[" * 60_000), "digests.json cannot be read"),
        ("digests.json", lambda path: path.write_text('{"state.json": 1}'), "digests.json cannot be read"),
        ("digests.json", Path.unlink, "digests.json is missing"),
        ("optimiser.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1]), "optimiser.safetensors has"),
        ("parameters.safetensors", Path.unlink, "parameters.safetensors cannot be read"),
    ],
)
def test_every_file_of_a_checkpoint_is_checked(run: Path, file: str, harm: Callable[[Path], None], wanted: str) -> None:
    whole = load_newest(run / "checkpoints")
    assert whole is not None and whole.damaged == [] and whole.state.position.update == 6
    harm(newest(run, file))
    found = load_newest(run / "checkpoints")
    assert found is not None and found.state.position.update == 3
    assert len(found.damaged) == 1 and "update-00000006 is damaged (" in found.damaged[0] and wanted in found.damaged[0]


def test_a_damaged_checkpoint_is_removed_by_the_next_save_and_never_kept_instead_of_a_good_one(
    run: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(newest(run), -5)
    save = loop.Trainer._save

    def stop_after(self: loop.Trainer) -> None:
        save(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "_save", stop_after)
    with pytest.raises(KeyboardInterrupt):
        train("--set", "checkpoint_every=4")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["update-00000003", "update-00000004"]


def test_when_all_are_damaged_the_run_stops(run: Path, train: Callable[..., str]) -> None:
    for path in (run / "checkpoints").glob("*/optimiser.safetensors"):
        flip(path, -5)
    before = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
    with pytest.raises(TrainError, match="update-00000006 is damaged .* no other checkpoint .* --restart"):
        train()
    assert sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file()) == before


def test_old_checkpoints_without_digests_are_used(run: Path, train: Callable[..., str]) -> None:
    (run / "progress.json").unlink()
    for path in (run / "checkpoints").iterdir():
        (path / "digests.json").unlink()
        state = path / "state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 1}))
    assert "continuing after update 6" in (shown := train()) and "warning" not in shown
    # The format itself tells of a file that was cut.
    file = newest(run)
    file.write_bytes(file.read_bytes()[:-1])
    assert "update-00000006 is damaged" in (shown := train()) and "continuing after update 3" in shown


@pytest.mark.parametrize("known_by", ["progress.json", "head"])
def test_a_run_whose_checkpoints_are_gone_stops_until_restart_is_given(
    run: Path, trained: Path, train: Callable[..., str], known_by: str
) -> None:
    shutil.rmtree(run / "checkpoints")
    if known_by == "head":  # a run from before there was progress.json
        (run / "progress.json").unlink()
    else:
        shutil.rmtree(run / "head")
    log = (run / "logs" / "train.csv").read_bytes()
    what = {"progress.json": "a run that was saved after update 6", "head": "a finished run"}[known_by]
    with pytest.raises(TrainError, match=f"{what}, .* has no checkpoint; copy .*--restart"):
        train()
    assert (run / "logs" / "train.csv").read_bytes() == log
    shown = train("--restart")
    assert "continuing" not in shown and weights(run) == weights(trained)
    assert newest(run).parent.name == "update-00000006"
    assert "continuing after update 6" in train()


def test_restart_begins_again_over_good_checkpoints(run: Path, train: Callable[..., str]) -> None:
    with pytest.raises(TrainError, match="another recipe"):
        train("--set", "seed=1")
    assert "continuing" not in train("--restart", "--set", "seed=1")


def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_from_zero(
    run: Path, trained: Path, train: Callable[..., str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "head")
    (run / "progress.json").unlink()
    assert "stopped before its first checkpoint; training starts from zero" in train()
    assert weights(run) == weights(trained)


def test_processes_that_find_different_checkpoints_stop(run: Path, train: Callable[..., str]) -> None:
    class Elsewhere(Ranks):
        def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + 3  # the other process found update 3

    with pytest.MonkeyPatch.context() as patch:
        ranks = Elsewhere(0, 2, torch.device("cpu"))
        patch.setattr(command, "join_ranks", lambda *_: contextlib.nullcontext(ranks))
        patch.setattr(Ranks, "wrap", lambda self, module: module)
        with pytest.raises(TrainError, match="different checkpoints .* update 6; give all machines the same --out"):
            train()
