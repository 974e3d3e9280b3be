"""`eagle-plugin data verify`: every byte of stores and checkpoints, one line per problem."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from store_documents import make_store_old, write_store
from training_runs import extract_features as extract
from training_runs import newest, recipe, run_training, write_rows

from eagle_plugin import cli
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.data.store.objects import open_folder

SECOND, THIRD = "shard-000-000001.safetensors", "shard-000-000002.safetensors"


def verify(capsys: pytest.CaptureFixture[str], *paths: Path | str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["data", "verify", *map(str, paths)])
    shown = capsys.readouterr()
    return code, shown.out, " ".join(shown.err.split())


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_store_with_every_kind_of_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path, range(40))
    shards = sorted(tmp_path.glob("shard-*"))
    code, out, _ = verify(capsys, tmp_path)
    size = sum(path.stat().st_size for path in shards)
    assert code == 0
    assert f"{len(shards)} shards, 40 documents, {size / 1e6:,.1f} MB read, nothing is missing or damaged" in out
    flip(shards[0], -3)
    FeatureStore(tmp_path)  # only a full read finds it
    code, out, err = verify(capsys, tmp_path)
    assert code == 2 and out.splitlines()[0].startswith(f"{tmp_path}: {shards[0].name} is damaged: document 'row-")
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    code, out, err = verify(capsys, tmp_path)
    assert code == 2 and len(out.splitlines()) == 3
    assert f"{SECOND} is missing" in out and f"{THIRD} has" in out
    assert f"error: {tmp_path} has 3 missing or damaged; run the same `eagle-plugin data features` command" in err
    write_store(tmp_path, range(40))
    assert verify(capsys, tmp_path)[0] == 0


def test_remote_and_old_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{uuid.uuid4()}"
    write_store(url, range(12))
    folder = open_folder(url)
    data = bytearray(folder.read(SECOND))
    assert verify(capsys, url)[0] == 0
    data[-1] ^= 1
    folder.remove(SECOND)
    folder.create(SECOND, data)
    assert verify(capsys, url)[0] == 2
    write_store(tmp_path, range(12))
    make_store_old(tmp_path)
    assert verify(capsys, tmp_path)[0] == 0
    flip(tmp_path / SECOND, -1)
    assert verify(capsys, tmp_path)[0] == 2


def test_checkpoints_of_a_run(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = extract(write_rows(tmp_path / "rows.jsonl", 20), tiny_target, tmp_path / "store")
    run = run_training(tmp_path, "run", recipe(tiny_target, store))
    code, out, _ = verify(capsys, store, run)
    assert code == 0 and f"{run}: 2 checkpoints" in out and f"{store}: 1 shards, 20 documents" in out
    flip(newest(run, "optimiser.safetensors"), -1)
    code, out, err = verify(capsys, run)
    assert code == 2 and out == f"{run}: update-00000006: optimiser.safetensors does not have its sha256\n"
    assert "continues from its newest checkpoint that is not damaged" in err
    older = run / "checkpoints" / "update-00000003"
    assert verify(capsys, older)[0] == 0
    (older / "digests.json").unlink()
    code, out, _ = verify(capsys, older)
    assert code == 2 and "update-00000003 has no digests.json, so it cannot be verified" in out


def test_what_is_no_store_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = verify(capsys, tmp_path)
    assert code == 2 and out == "" and "is not a feature store (no manifest.json)" in err
