"""A feature store after kills, on a full disk, with damaged shards, and with writers that conflict."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_documents import MANIFEST, assert_same, make_document, write_store

from eagle_plugin.data.rows import DataError
from eagle_plugin.data.store.feature_store import FeatureStore, FeatureWriter

KILLED_WRITER = """
import os, signal, sys
sys.path[:0] = {paths!r}
from store_documents import write_store
from eagle_plugin import atomic_io
name_new_file, calls = atomic_io._name_new_file, 0
def kill_at_third(partial, final):
    global calls
    calls += final.name.startswith("shard")
    if calls == 3 and {before!r}: os.kill(os.getpid(), signal.SIGKILL)
    name_new_file(partial, final)
    if calls == 3: os.kill(os.getpid(), signal.SIGKILL)
atomic_io._name_new_file = kill_at_third
write_store({url!r}, range(40))
"""


@pytest.mark.parametrize("before", [True, False], ids=["before the shard has its name", "right after"])
def test_after_kill_9_the_next_run_makes_the_same_store(tmp_path: Path, before: bool) -> None:
    write_store(tmp_path / "whole", range(40))
    url = str(tmp_path / "killed")
    code = KILLED_WRITER.format(paths=sys.path, before=before, url=url)
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert any(".partial-" in path.name for path in Path(url).iterdir())  # the kill was inside a write
    left = FeatureStore(url)  # readable at once
    assert 0 < len(left.entries) < 40
    write_store(url, range(40))
    assert sorted(path.name for path in Path(url).iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir())
    store = FeatureStore(url)
    assert [entry.id for entry in store.entries] == [f"row-{number}" for number in range(40)]
    for number, entry in enumerate(store.entries):
        assert_same(store.read(entry), make_document(number))


FULL_DISK = """
import resource, sys
sys.path[:0] = {paths!r}
from store_documents import write_store
from eagle_plugin.data.rows import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    write_store({url!r}, range(40), shard_bytes={shard})
except DataError as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    code = FULL_DISK.format(paths=sys.path, url=str(tmp_path / "s"), shard=8000)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is full" in found.stdout and "run again" in found.stdout
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["manifest.json"]
    write_store(tmp_path / "s", range(40))
    assert len(FeatureStore(tmp_path / "s").entries) == 40


@pytest.mark.parametrize("part", ["ids", "aux", "last", "mask"])
def test_a_flipped_byte_is_found_and_named(tmp_path: Path, part: str) -> None:
    write_store(tmp_path, range(5), shard_bytes=1 << 20)
    victim = FeatureStore(tmp_path).entries[2]
    size = {"ids": 4, "aux": 2 * 12, "last": 2 * 6, "mask": 1}
    place = victim.offset + sum(size[p] * victim.length for p in list(size)[: list(size).index(part)])
    path = tmp_path / victim.shard
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    store = FeatureStore(tmp_path)
    with pytest.raises(DataError, match=f"'{victim.id}'.*{victim.shard}.*damaged"):
        store.read(victim)
    assert_same(store.read(store.entries[3]), make_document(3))  # the other documents are not damaged


def test_cut_lost_and_foreign_shards_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path, range(5), shard_bytes=1 << 20)
    path = tmp_path / "shard-000-000000.safetensors"
    store = FeatureStore(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(DataError, match="damaged"):
        store.read(store.entries[-1])
    path.unlink()
    with pytest.raises(DataError, match="has lost"):
        store.read(store.entries[0])
    for bad in (b"", whole[:50], b"\x02" + bytes(7) + b"{}"):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="not a shard"):
            FeatureStore(tmp_path)
    with pytest.raises(DataError, match="not a feature store"):
        FeatureStore(tmp_path / "elsewhere")


def test_ranks_share_a_store_and_two_of_one_rank_are_refused(tmp_path: Path) -> None:
    first = FeatureWriter(tmp_path, MANIFEST, rank=0)
    second = FeatureWriter(tmp_path, MANIFEST, rank=0)
    with FeatureWriter(tmp_path, MANIFEST, rank=1) as other:
        other.add(make_document(2))
    first.add(make_document(0))
    first.close()
    second.add(make_document(1))
    with pytest.raises(DataError, match="--rank"):
        second.close()
    assert {entry.id for entry in FeatureStore(tmp_path).entries} == {"row-0", "row-2"}
    assert FeatureWriter(tmp_path, MANIFEST, rank=5).done == {"row-0", "row-2"}  # of all ranks


def test_documents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = make_document(3)
    with FeatureWriter(tmp_path, MANIFEST) as writer:
        writer.add(good)
        with pytest.raises(DataError, match="already"):
            writer.add(good)
        for wrong in ({"aux": None}, {"last": good.last[:-1]}, {"mask": good.mask[1:]}, {"aux": good.last}):
            with pytest.raises(DataError, match=next(iter(wrong))):
                writer.add(dataclasses.replace(good, id="other", **wrong))


def test_an_error_writes_nothing_and_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    for kind, kept in ((ValueError, 0), (KeyboardInterrupt, 2)):
        with pytest.raises(kind), FeatureWriter(tmp_path / kind.__name__, MANIFEST) as writer:
            writer.add(make_document(0))
            writer.add(make_document(1))
            raise kind
        assert len(FeatureStore(tmp_path / kind.__name__).entries) == kept
