"""The feature store: what was written is read back, other targets and settings are refused, the cache is bounded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
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
from store_documents import MANIFEST, RUN, assert_same, make_document, write_documents, write_store

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import Entry, FeatureStore, FeatureWriter
from eagle_plugin.learning.data.store.objects import LocalFolder
from eagle_plugin.learning.data.target_identity import target_digests


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


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
    with FeatureWriter(url, manifest, RUN) as writer:
        write_documents(writer, numbers, shard_bytes)
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
    write_store(url, range(12))
    write_store(url, range(12))  # nothing to do
    store = FeatureStore(url)
    reads: list[tuple[str, int, int]] = []
    read = store._folder.read
    monkeypatch.setattr(store._folder, "read", lambda *a: reads.append(a) or read(*a))
    for number, entry in enumerate(store.entries):
        assert_same(store.read(entry), make_document(number))
    assert len(reads) == 12
    assert len({entry.shard for entry in store.entries}) > 2


def test_shards_are_ordinary_safetensors(tmp_path: Path) -> None:
    write_store(tmp_path, range(3), shard_bytes=1 << 20)
    with safe_open(str(tmp_path / "shard-000-000000.safetensors"), "pt") as file:
        for number in range(3):
            document = make_document(number)
            assert torch.equal(file.get_tensor(f"{number}.last"), document.last)
            assert torch.equal(file.get_tensor(f"{number}.aux"), document.aux)
            mask = file.get_tensor(f"{number}.mask")
            assert mask[: len(document.mask)].bool().equal(document.mask) and mask.sum() == document.mask.sum()


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    write_store(tmp_path, range(40))
    store = FeatureStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for number, document in enumerate(pool.map(store.read, store.entries)):
            assert_same(document, make_document(number))


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
    write_store(tmp_path, range(2))
    other = dataclasses.replace(MANIFEST, **change)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"{next(iter(change))} .* not .*--store"):
        FeatureWriter(tmp_path, other, RUN)
    FeatureWriter(tmp_path, dataclasses.replace(MANIFEST, target="renamed"), RUN).close()


def test_a_manifest_of_another_version_or_shape_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path, range(1))
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


def test_a_cache_serves_what_fits_and_heals_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(tmp_path / "store", range(20))
    sizes = [_size(entry) for entry in FeatureStore(tmp_path / "store").entries]
    limit = sum(sizes) // 2
    remote: list[str] = []
    read = LocalFolder.read

    def count(self: LocalFolder, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        if name.startswith("shard") and start:
            remote.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(LocalFolder, "read", count)
    for again in (False, True):  # a second process uses the cache of the first
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
