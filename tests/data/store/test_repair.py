"""A store knows what it must have, and the same run again writes exactly what is missing or damaged."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_server import s3_bucket
from store_documents import MANIFEST, assert_same, make_document, make_store_old, write_store

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.contents import read_contents
from eagle_plugin.learning.data.store.feature_store import FeatureStore, FeatureWriter
from eagle_plugin.learning.data.store.objects import open_folder
from eagle_plugin.learning.data.store.plan import Plan, Run
from eagle_plugin.learning.data.store.shards import read_in_full

SECOND = "shard-000-000001.safetensors"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", range(40))
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("harm", "noticed"),
    [
        (Path.unlink, f"{SECOND} is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), f"{SECOND} has .* bytes, wanted"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), f"{SECOND} has .* bytes, wanted"),
        (lambda path: flip(path, 4), f"{SECOND} is damaged: its header"),
        (lambda path: flip(path, path.read_bytes().index(b"split")), f"{SECOND} is damaged: its list of documents"),
        (lambda path: flip(path, path.read_bytes().index(b"chat")), f"{SECOND} is damaged: its list of documents"),
        (lambda path: shutil.copy(path.with_name("shard-000-000002.safetensors"), path), f"{SECOND} has other docum"),
        (lambda path: flip(path, len(path.read_bytes()) - 1), None),  # a document: found when it is read
        (lambda path: flip(path, path.read_bytes().index(b"BF16")), None),  # of the header, what only others read
    ],
    ids=["lost", "short", "long", "header", "key", "value", "other", "document", "dtype"],
)
def test_the_same_run_repairs_one_shard(
    store: Path, harm: Callable[[Path], None], noticed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, untouched = files(store), {path.name: path.stat().st_ino for path in store.iterdir() if path.name != SECOND}
    harm(store / SECOND)
    if noticed is None:
        FeatureStore(store)
    else:
        with pytest.raises(DataError, match=f"{noticed}.*; run the same `eagle-plugin data features` command again"):
            FeatureStore(store)
    finished: list[str] = []
    finish = FeatureWriter.finish
    monkeypatch.setattr(FeatureWriter, "finish", lambda self, name: finished.append(name) or finish(self, name))
    write_store(store, range(40))
    assert finished == [SECOND]
    assert files(store) == whole
    assert {name: (store / name).stat().st_ino for name in untouched} == untouched  # not written again
    FeatureStore(store)


def test_every_byte_of_a_shard_is_checked(store: Path) -> None:
    folder = open_folder(store)
    contents = read_contents(folder)
    data = (store / SECOND).read_bytes()
    places = [*range(0, contents.shards[SECOND].entries[0].offset, 7), *range(0, len(data), 41), len(data) - 1]
    found = 0
    for place in places:
        flip(store / SECOND, place)
        damaged = read_contents(folder)
        if SECOND in damaged.problems:
            found += 1
        else:
            with pytest.raises(DataError, match="is damaged"):
                list(read_in_full(folder, damaged.shards[SECOND], MANIFEST))
        flip(store / SECOND, place)
    assert 0 < found < len(places)
    assert sum(read_in_full(folder, contents.shards[SECOND], MANIFEST)) == len(data)  # control: nothing is damaged


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_a_remote_store_is_checked_and_repaired(scheme: str, s3: str) -> None:
    url = f"{s3 if scheme == 's3' else 'memory:/'}/{uuid.uuid4()}"
    write_store(url, range(12))
    folder = open_folder(url)
    whole = {name: bytes(folder.read(name)) for name in folder.names()}
    cut = whole[SECOND][:-1]
    for harm in (lambda: folder.remove(SECOND), lambda: (folder.remove(SECOND), folder.create(SECOND, cut))):
        harm()
        with pytest.raises(DataError, match=f"{SECOND} (is missing|has .* bytes)"):
            FeatureStore(url)
        write_store(url, range(12))
        assert {name: bytes(folder.read(name)) for name in folder.names()} == whole


def test_more_rows_are_a_run_of_its_own_and_what_was_there_stays(store: Path) -> None:
    before = files(store)
    write_store(store, range(50))
    after = files(store)
    assert before.items() <= after.items()
    assert [entry.id for entry in FeatureStore(store).entries] == [f"row-{number}" for number in range(50)]
    # A shard of the first run is lost: the second one extracts its documents again.
    lost = [entry.id for entry in FeatureStore(store).entries if entry.shard == SECOND]
    (store / SECOND).unlink()
    with pytest.raises(DataError, match=f"{SECOND} is missing"):
        FeatureStore(store)
    write_store(store, range(50))
    found = FeatureStore(store)
    assert sorted(entry.id for entry in found.entries) == sorted(f"row-{number}" for number in range(50))
    for entry in found.entries:
        if entry.id in lost:
            assert_same(found.read(entry), make_document(int(entry.id.removeprefix("row-"))))


def test_a_damaged_shard_of_other_rows_is_not_removed(store: Path) -> None:
    (store / SECOND).write_bytes(b"")
    damaged = files(store)
    with pytest.raises(DataError, match=f"{SECOND} is damaged.*other rows or options.*delete it and run again"):
        write_store(store, range(50))
    assert files(store) == damaged
    (store / SECOND).unlink()
    write_store(store, range(50))
    assert len(FeatureStore(store).entries) == 50


def test_an_interrupted_run_then_more_rows(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, MANIFEST, Run("first")) as writer:
        writer.plan([["row-0", "row-1"], ["row-2", "row-3"]])
        for number in range(2):
            writer.add(make_document(number))
        writer.finish(writer.names[0])
    write_store(tmp_path, range(6))
    assert [entry.id for entry in FeatureStore(tmp_path).entries] == [f"row-{number}" for number in range(6)]


@pytest.mark.parametrize("harm", ["lost", "damaged", "deep"])
def test_a_plan_that_is_gone_is_noticed_and_made_again(store: Path, harm: str) -> None:
    if harm == "lost":
        (store / "plan-000-000.json").unlink()
    elif harm == "damaged":
        flip(store / "plan-000-000.json", 200)
    else:
        (store / "plan-000-000.json").write_text("[" * 60_000)
    with pytest.raises(DataError, match="plan-000-000.json is (missing|damaged)"):
        FeatureStore(store)
    write_store(store, range(40))
    assert len(FeatureStore(store).entries) == 40
    (store / SECOND).unlink()
    with pytest.raises(DataError, match=f"{SECOND} is missing"):
        FeatureStore(store)


def test_every_process_must_have_begun(tmp_path: Path) -> None:
    write_store(tmp_path, range(10), rank=1, world=2)
    with pytest.raises(DataError, match=r"plan-000-000\.json is missing: process 0 of 2 has not begun"):
        FeatureStore(tmp_path)
    assert isinstance(Plan.from_json((tmp_path / "plan-000-001.json").read_bytes()), Plan)


def test_a_changed_manifest_is_noticed(store: Path) -> None:
    path = store / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"logit_factor": 1.1}))
    with pytest.raises(DataError, match=r"manifest\.json is not the manifest .*; copy manifest\.json again"):
        FeatureStore(store)
    path.write_text(json.dumps(values | {"target": "renamed"}))  # for readers only
    FeatureStore(store)


def test_old_stores_open_and_go_on(store: Path) -> None:
    make_store_old(store)
    old = files(store)
    assert len(FeatureStore(store).entries) == 40
    folder = open_folder(store)
    for shard in read_contents(folder).shards.values():
        assert sum(read_in_full(folder, shard, MANIFEST)) == shard.size
    (store / SECOND).write_bytes(old[SECOND][:-1])  # sizes can be checked without a plan
    with pytest.raises(DataError, match=f"{SECOND} has .* bytes"):
        FeatureStore(store)
    (store / SECOND).write_bytes(old[SECOND])
    write_store(store, range(50))
    assert old.items() <= files(store).items()
    assert len(FeatureStore(store).entries) == 50
    (store / SECOND).unlink()  # from now on it is known to belong to the store
    with pytest.raises(DataError, match=f"{SECOND} is missing"):
        FeatureStore(store)


def test_every_process_repairs_its_own_shards(tmp_path: Path) -> None:
    for rank in range(2):
        write_store(tmp_path, range(20 * rank, 20 * rank + 20), rank=rank, world=2, run="both")
    whole = files(tmp_path)
    lost = "shard-001-000001.safetensors"
    (tmp_path / lost).unlink()
    write_store(tmp_path, range(20), rank=0, world=2, run="both")
    assert files(tmp_path) == {name: data for name, data in whole.items() if name != lost}
    with pytest.raises(DataError, match=f"{lost} is missing"):
        FeatureStore(tmp_path)
    write_store(tmp_path, range(20, 40), rank=1, world=2, run="both")
    assert files(tmp_path) == whole
    # More rows, then a shard of the first run is lost: both processes plan again, and no document is there twice.
    for _ in range(2):
        for rank in range(2):
            write_store(tmp_path, range(30 * rank, 30 * rank + 30), rank=rank, world=2, run="more")
        ids = [entry.id for shard in read_contents(open_folder(tmp_path)).shards.values() for entry in shard.entries]
        assert sorted(ids) == sorted(set(ids)) and len(FeatureStore(tmp_path).entries) == len(ids)
        (tmp_path / lost).unlink(missing_ok=True)
