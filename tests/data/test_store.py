"""The feature store: what was written comes back, damage and strangers are refused, and a kill costs one shard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from object_server import s3_bucket
from safetensors import safe_open

from eagle_plugin.data.rows import DataError
from eagle_plugin.data.store.feature_store import Document, Entry, FeatureStore, FeatureWriter
from eagle_plugin.data.store.manifest import Manifest, target_digests
from eagle_plugin.data.store.objects import LocalFolder

MANIFEST = Manifest(
    target="tiny",
    config_sha256="c",
    weights_sha256="w",
    tokenizer_sha256="t",
    template_sha256="p",
    aux_layers=(1, 2),
    hidden_size=6,
    num_layers=4,
    vocab_size=1 << 20,
    dtype="float32",
    max_length=64,
)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


def make_document(number: int, manifest: Manifest = MANIFEST) -> Document:
    random = torch.Generator().manual_seed(number)
    n = 1 + number * 7 % 23
    width = len(manifest.aux_layers) * manifest.hidden_size
    return Document(
        id=f"row-{number}",
        source="chat" if number % 2 else "code",
        split="val" if number % 5 == 0 else "train",
        ids=torch.randint(manifest.vocab_size, (n,), generator=random),
        mask=torch.arange(n) >= n // 2,
        aux=torch.randn(n, width, generator=random).bfloat16() if width else None,
        last=torch.randn(n, manifest.hidden_size, generator=random).bfloat16(),
    )


def assert_same(found: Document, wanted: Document) -> None:
    for field in dataclasses.fields(Document):
        a, b = getattr(found, field.name), getattr(wanted, field.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a == b


def write(url: str | Path, numbers: range, shard_bytes: int = 2000, rank: int = 0) -> None:
    with FeatureWriter(url, MANIFEST, rank, shard_bytes) as writer:
        for number in numbers:
            if f"row-{number}" not in writer.done:
                writer.add(make_document(number))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=9, unique=True),
    st.integers(1, 5000),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_what_was_written_comes_back(numbers: list[int], shard_bytes: int, hidden: int, aux: int) -> None:
    manifest = dataclasses.replace(MANIFEST, hidden_size=hidden, aux_layers=tuple(range(aux)))
    url = f"memory://{uuid.uuid4()}"
    with FeatureWriter(url, manifest, shard_bytes=shard_bytes) as writer:
        for number in numbers:
            writer.add(make_document(number, manifest))
    store = FeatureStore(url)
    assert store.manifest == manifest
    assert [entry.id for entry in store.entries] == [f"row-{number}" for number in numbers]
    for entry, number in zip(store.entries, numbers, strict=True):
        wanted = make_document(number, manifest)
        assert (entry.source, entry.split, entry.length) == (wanted.source, wanted.split, len(wanted.ids))
        assert entry.n_response == int(wanted.mask.sum())
        assert_same(store.read(entry), wanted)


def test_a_store_on_s3_is_the_same_and_a_document_is_one_request(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{s3}/{uuid.uuid4()}"
    write(url, range(12))
    write(url, range(12))  # nothing to do
    store = FeatureStore(url)
    reads: list[tuple[str, int, int]] = []
    read = store._folder.read
    monkeypatch.setattr(store._folder, "read", lambda *a: reads.append(a) or read(*a))
    for number, entry in enumerate(store.entries):
        assert_same(store.read(entry), make_document(number))
    assert len(reads) == 12
    assert len({entry.shard for entry in store.entries}) > 2


def test_shards_are_ordinary_safetensors(tmp_path: Path) -> None:
    write(tmp_path, range(3), shard_bytes=1 << 20)
    with safe_open(str(tmp_path / "shard-000-000000.safetensors"), "pt") as file:
        for number in range(3):
            document = make_document(number)
            assert torch.equal(file.get_tensor(f"{number}.last"), document.last)
            assert torch.equal(file.get_tensor(f"{number}.aux"), document.aux)
            mask = file.get_tensor(f"{number}.mask")
            assert mask[: len(document.mask)].bool().equal(document.mask) and mask.sum() == document.mask.sum()


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    write(tmp_path, range(40))
    store = FeatureStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for number, document in enumerate(pool.map(store.read, store.entries)):
            assert_same(document, make_document(number))


KILLED_WRITER = """
import os, signal, sys
sys.path[:0] = {paths!r}
from test_store import write
from eagle_plugin import atomic_io
name_new_file, calls = atomic_io._name_new_file, 0
def kill_at_third(partial, final):
    global calls
    calls += final.name.startswith("shard")
    if calls == 3 and {before!r}: os.kill(os.getpid(), signal.SIGKILL)
    name_new_file(partial, final)
    if calls == 3: os.kill(os.getpid(), signal.SIGKILL)
atomic_io._name_new_file = kill_at_third
write({url!r}, range(40))
"""


@pytest.mark.parametrize("before", [True, False], ids=["before the shard has its name", "right after"])
def test_after_kill_9_the_next_run_makes_the_same_store(tmp_path: Path, before: bool) -> None:
    write(tmp_path / "whole", range(40))
    url = str(tmp_path / "killed")
    code = KILLED_WRITER.format(paths=[str(Path(__file__).parent), *sys.path], before=before, url=url)
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert any(".partial-" in path.name for path in Path(url).iterdir())  # the kill did hit half-way
    left = FeatureStore(url)  # readable at once
    assert 0 < len(left.entries) < 40
    write(url, range(40))
    assert sorted(path.name for path in Path(url).iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir())
    store = FeatureStore(url)
    assert [entry.id for entry in store.entries] == [f"row-{number}" for number in range(40)]
    for number, entry in enumerate(store.entries):
        assert_same(store.read(entry), make_document(number))


FULL_DISK = """
import resource, sys
sys.path[:0] = {paths!r}
from test_store import write
from eagle_plugin.data.rows import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    write({url!r}, range(40), shard_bytes={shard})
except DataError as error:
    print(error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    code = FULL_DISK.format(paths=[str(Path(__file__).parent), *sys.path], url=str(tmp_path / "s"), shard=8000)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is full" in found.stdout and "run again" in found.stdout
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["manifest.json"]
    write(tmp_path / "s", range(40))
    assert len(FeatureStore(tmp_path / "s").entries) == 40


@pytest.mark.parametrize("part", ["ids", "aux", "last", "mask"])
def test_a_flipped_byte_is_found_and_named(tmp_path: Path, part: str) -> None:
    write(tmp_path, range(5), shard_bytes=1 << 20)
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
    assert_same(store.read(store.entries[3]), make_document(3))  # its neighbours are whole


def test_cut_lost_and_foreign_shards_are_refused(tmp_path: Path) -> None:
    write(tmp_path, range(5), shard_bytes=1 << 20)
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


@pytest.mark.parametrize(
    "change",
    [
        {"weights_sha256": "x"},
        {"tokenizer_sha256": "x"},
        {"aux_layers": (1, 3)},
        {"max_length": 32},
        {"dtype": "float16"},
    ],
)
def test_another_target_or_setting_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path, range(2))
    other = dataclasses.replace(MANIFEST, **change)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"{next(iter(change))} .* not .*--store"):
        FeatureWriter(tmp_path, other)
    FeatureWriter(tmp_path, dataclasses.replace(MANIFEST, target="renamed")).close()


def test_a_manifest_of_another_version_or_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(1))
    path = tmp_path / "manifest.json"
    for change, match in (
        ({"version": 2}, "version 2"),
        ({"surprise": 1}, "surprise"),
        ({"aux_layers": 5}, "manifest"),
    ):
        path.write_bytes(json.dumps({**json.loads(MANIFEST.to_json()), **change}).encode())
        with pytest.raises(DataError, match=match):
            FeatureStore(tmp_path)


def test_the_target_of_a_store_is_known_by_its_files(tiny_target: Path, tiny_eagle3: Path) -> None:
    manifest = dataclasses.replace(MANIFEST, **target_digests(tiny_target))
    manifest.check_target(tiny_target)
    with pytest.raises(DataError, match="weights_sha256"):
        manifest.check_target(tiny_eagle3)


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
    assert FeatureWriter(tmp_path, MANIFEST, rank=5).done == {"row-0", "row-2"}  # whoever wrote them


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


def test_a_cache_serves_what_fits_and_heals_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "store", range(20))
    sizes = [_size(entry) for entry in FeatureStore(tmp_path / "store").entries]
    limit = sum(sizes) // 2
    remote: list[str] = []
    read = LocalFolder.read

    def count(self: LocalFolder, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        if name.startswith("shard") and start:
            remote.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(LocalFolder, "read", count)
    for again in (False, True):  # a second process finds the first one's cache
        store = FeatureStore(tmp_path / "store", tmp_path / "cache", limit)
        remote.clear()
        for number, entry in enumerate(store.entries):
            assert_same(store.read(entry), make_document(number))
        assert (len(remote) < 20) == again
        used = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
        assert limit // 2 < used <= limit
    damaged = next((tmp_path / "cache").iterdir())
    damaged.write_bytes(b"")
    store = FeatureStore(tmp_path / "store", tmp_path / "cache", limit)
    for number, entry in enumerate(store.entries):
        assert_same(store.read(entry), make_document(number))
    assert hashlib.sha256(damaged.read_bytes()).hexdigest() == damaged.name


def _size(entry: Entry) -> int:
    return -(-entry.length * (4 + 2 * 3 * 6 + 1) // 8) * 8
