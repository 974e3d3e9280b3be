"""`eagle-plugin data features` interrupted anywhere and run again gives the bytes of a run without interruption."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training_runs import write_rows

from eagle_plugin.common import atomic_io
from eagle_plugin.learning.data import extract
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.data.store.features import Taps

Run = Callable[..., Path]


def files(folder: Path) -> dict[str, bytes]:
    """All files, without the temporary ones of a killed writer."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 150)


@pytest.fixture
def run(rows: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with shards of 192 KiB; `batch_tokens` is an option that decides the neighbours."""
    monkeypatch.setattr(extract, "MIB", 3 << 15)

    def run(store: Path, *more: str, batch_tokens: int = 150) -> Path:
        arguments = [str(rows), "--target", str(tiny_target), "--store", str(store), "--dtype", "float32"]
        options = ["--device", "cpu", "--shard-mib", "2", "--batch-tokens", str(batch_tokens)]
        assert extract.main([*arguments, *options, *more]) == 0
        return store

    return run


@pytest.fixture
def whole(run: Run, tmp_path: Path) -> dict[str, bytes]:
    found = files(run(tmp_path / "whole"))
    assert len(found) > 5
    return found


def test_ctrl_c_at_several_batches(
    run: Run, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = 0
    states = Taps.run

    def stop_at(self: Taps, *arguments: object) -> object:
        nonlocal batches
        batches += 1
        if batches == stop:
            raise KeyboardInterrupt
        return states(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Taps, "run", stop_at)
    stop = 10**9
    run(tmp_path / "count")
    total = batches
    finished = set()
    for stop in (3, total // 3, total // 2, total - 1):  # the first two are the checks of the readout
        store, batches = tmp_path / f"stopped at {stop}", 0
        with pytest.raises(KeyboardInterrupt):
            run(store)
        finished.add(len(files(store)))
        assert files(store).items() < whole.items()
        batches = -(10**9)
        run(store)
        assert files(store) == whole
    assert len(finished) > 2


@pytest.mark.parametrize("before", [True, False])
def test_stop_inside_a_write(
    run: Run, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    name_file = atomic_io._name_new_file

    def stop(temporary: Path, final: Path) -> None:
        if final.name != "shard-000-000002.safetensors":
            name_file(temporary, final)
        elif not before:
            name_file(temporary, final)
            raise KeyboardInterrupt
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic_io, "_name_new_file", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped")
    monkeypatch.setattr(atomic_io, "_name_new_file", name_file)
    assert ("shard-000-000002.safetensors" in files(tmp_path / "stopped")) != before
    run(tmp_path / "stopped")
    assert files(tmp_path / "stopped") == whole


def test_a_full_disk_ends_the_command_and_keeps_what_was_finished(
    run: Run, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_file = atomic_io._name_new_file
    left = [final for final in sorted(whole) if final.startswith("shard")][:2]

    def fill(temporary: Path, final: Path) -> None:
        if final.name.startswith("shard") and final.name not in left:
            raise OSError(errno.ENOSPC, "No space left on device")
        name_file(temporary, final)

    monkeypatch.setattr(atomic_io, "_name_new_file", fill)
    with pytest.raises(DataError, match=r"the disk of .* is full: shard-000-000002.safetensors needs .* is kept"):
        run(tmp_path / "full")
    assert [name for name in sorted(files(tmp_path / "full")) if name.startswith("shard")] == left
    monkeypatch.setattr(atomic_io, "_name_new_file", name_file)
    run(tmp_path / "full")
    assert files(tmp_path / "full") == whole


def test_a_lost_and_a_damaged_shard_are_extracted_again(
    run: Run, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "whole"
    (store / "shard-000-000001.safetensors").unlink()
    damaged = bytearray(whole["shard-000-000003.safetensors"])
    damaged[-9] ^= 16
    (store / "shard-000-000003.safetensors").write_bytes(damaged)
    capsys.readouterr()
    run(store)
    shown = " ".join(capsys.readouterr().err.split())
    assert "shard-000-000003.safetensors is damaged: document '" in shown
    assert f"2 of {len(whole) - 2} shards are left to extract" in shown
    assert files(store) == whole
    # Without reading them, only what sizes and headers tell is repaired.
    (store / "shard-000-000003.safetensors").write_bytes(damaged)
    run(store, "--no-verify")
    assert files(store) != whole


def test_control_other_neighbours_give_other_bytes(run: Run, whole: dict[str, bytes], tmp_path: Path) -> None:
    first, second = FeatureStore(tmp_path / "whole"), FeatureStore(run(tmp_path / "other", batch_tokens=450))
    others = {entry.id: entry for entry in second.entries}
    differ = sum(not torch.equal(first.read(entry).last, second.read(others[entry.id]).last) for entry in first.entries)
    assert differ > 0
