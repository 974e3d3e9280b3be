"""A feature store after kills, on a full disk, with damaged shards, and with writers that conflict."""

from __future__ import annotations

import dataclasses
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from store_documents import MANIFEST, RUN, assert_same, make_document, write_documents, write_store

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import FeatureStore, FeatureWriter
from eagle_plugin.learning.data.store.plan import Run

KILLED_WRITER = """
import os, signal, sys
sys.path[:0] = {paths!r}
from store_documents import write_store
from eagle_plugin.common import atomic_io
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
    with pytest.raises(DataError, match=r"shard-000-\d+.safetensors is missing, and \d+ more; run the same"):
        FeatureStore(url)
    assert len(list(Path(url).glob("shard-*"))) == (2 if before else 3)
    write_store(url, range(40))
    assert files(Path(url)) == files(tmp_path / "whole")
    store = FeatureStore(url)
    assert [entry.id for entry in store.entries] == [f"row-{number}" for number in range(40)]
    for number, entry in enumerate(store.entries):
        assert_same(store.read(entry), make_document(number))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


DEEP = struct.pack("<Q", 60_000) + b"[" * 60_000  # deeper than Python's JSON parser goes


FULL_DISK = """
import resource, sys
sys.path[:0] = {paths!r}
from store_documents import write_store
from eagle_plugin.learning.data.rows import DataError
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
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["manifest.json", "plan-000-000.json"]
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
    with pytest.raises(DataError, match=rf"{path.name} has {len(whole) - 40:,} bytes, wanted {len(whole):,}; run"):
        FeatureStore(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="has lost"):
        store.read(store.entries[0])
    with pytest.raises(DataError, match=f"{path.name} is missing; run"):
        FeatureStore(tmp_path)
    for bad in (
        b"",
        whole[:50],
        b"\x02" + bytes(7) + b"{}",
        b"\xff" * 7 + whole[7:],
        DEEP,
        whole.replace(b"chat", b"chap"),
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=f"{path.name} is damaged: its (header is not that of a shard|list of doc)"):
            FeatureStore(tmp_path)
    with pytest.raises(DataError, match="not a feature store"):
        FeatureStore(tmp_path / "elsewhere")


def test_ranks_share_a_store_and_two_of_one_rank_are_refused(tmp_path: Path) -> None:
    first, second = (FeatureWriter(tmp_path, MANIFEST, Run("x", 0, 2)) for _ in range(2))
    with FeatureWriter(tmp_path, MANIFEST, Run("x", 1, 2)) as other:
        write_documents(other, [2])
    with pytest.raises(DataError, match=r"plan-000-000.json is missing: process 0 of 2 has not begun"):
        FeatureStore(tmp_path)
    write_documents(first, [0])
    first.close()
    with pytest.raises(DataError, match="--rank"):
        write_documents(second, [0])
    second.close()
    third = FeatureWriter(tmp_path, MANIFEST, Run("y"))
    third.plan([["row-1"]])
    fourth = FeatureWriter(tmp_path, MANIFEST, Run("y"))
    write_documents(third, [1])
    third.close()
    write_documents(fourth, [1])
    with pytest.raises(DataError, match="--rank"):
        fourth.close()
    assert {entry.id for entry in FeatureStore(tmp_path).entries} == {"row-0", "row-1", "row-2"}
    assert FeatureWriter(tmp_path, MANIFEST, Run("z", 5, 6)).earlier == {"row-0", "row-1", "row-2"}  # of all ranks


def test_documents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = make_document(3)
    with FeatureWriter(tmp_path, MANIFEST, RUN) as writer:
        for wrong in ({"aux": None}, {"last": good.last[:-1]}, {"mask": good.mask[1:]}, {"aux": good.last}):
            with pytest.raises(DataError, match=next(iter(wrong))):
                writer.add(dataclasses.replace(good, id="other", **wrong))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_and_ctrl_c_keep_finished_shards_and_write_no_part_of_one(tmp_path: Path, kind: type) -> None:
    with pytest.raises(kind), FeatureWriter(tmp_path, MANIFEST, RUN) as writer:
        writer.plan([["row-0", "row-1"], ["row-2", "row-3"]])
        for number in range(3):
            writer.add(make_document(number))
            if number == 1:
                writer.finish(writer.names[0])
        raise kind
    assert [path.name for path in tmp_path.glob("shard-*")] == [writer.names[0]]


def test_rows_that_change_during_the_extraction_are_found(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path, MANIFEST, RUN) as writer:
        writer.plan([["row-0", "row-1"]])
        writer.add(make_document(0))
        with pytest.raises(DataError, match="the row file changed"):
            writer.finish(writer.names[0])
