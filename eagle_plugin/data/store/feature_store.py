"""The feature store: the hidden states of a target for each document, in shards below one URL.

    manifest.json                        what the features were made from
    shard-{rank:03}-{number:06}.safetensors

A shard has its documents and their index in one object, which is written whole or not at all: after a kill there is
nothing to repair.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from eagle_plugin.data.rows import DataError
from eagle_plugin.data.store.manifest import MANIFEST, Manifest
from eagle_plugin.data.store.objects import Folder, LocalFolder, ObjectExists, open_folder
from eagle_plugin.data.store.shards import Document, Entry, Layout, decode, encode, read_entries, write_shard

__all__ = ["SHARD_BYTES", "Document", "Entry", "FeatureStore", "FeatureWriter"]

SHARD_BYTES = 256 << 20


class FeatureWriter:
    """Writes documents into shards; a second run with the same manifest continues the first one.

    `done` has the ids of all documents in the store, of all ranks; do not add these again. Shards are written in the
    background, one at a time. Processes that write at the same time must have different ranks.

    Raises:
        DataError: the store was made from another target or with other settings, a document has the wrong shape, or
            writing failed.
    """

    def __init__(self, url: str | Path, manifest: Manifest, rank: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
        self.manifest, self.rank, self.shard_bytes = manifest, rank, shard_bytes
        self._folder = open_folder(url)
        _check_manifest(self._folder, manifest)
        prefix = f"shard-{rank:03d}-"
        if isinstance(self._folder, LocalFolder):
            self._folder.remove_partial(prefix)
        self.done = {entry.id for entry in read_entries(self._folder)}
        numbers = [int(name[len(prefix) :][:6]) for name in self._folder.names() if name.startswith(prefix)]
        self._number = max(numbers, default=-1) + 1
        self._documents: list[tuple[Entry, bytes]] = []
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, "feature-writer")
        self._pending: Future[None] | None = None

    def add(self, document: Document) -> None:
        """Add one document. It is on disk when its shard is written, at the latest after `close`."""
        if document.id in self.done:
            raise DataError(f"document {document.id!r} is in {self._folder.url} already; give every row its own id")
        data = encode(document, self.manifest)
        self.done.add(document.id)
        n, marked = len(document.ids), int(document.mask.sum())
        self._documents.append((Entry(document.id, document.source, document.split, "", 0, n, marked, ""), data))
        self._bytes += len(data)
        if self._bytes >= self.shard_bytes:
            self._flush()

    def close(self) -> None:
        """Write the last shard and wait until it is on disk."""
        try:
            if self._documents:
                self._flush()
            self._wait()
        finally:
            self._pool.shutdown()

    def _flush(self) -> None:
        self._wait()
        name = f"shard-{self.rank:03d}-{self._number:06d}.safetensors"
        self._pending = self._pool.submit(write_shard, self._folder, name, self._documents, self.manifest)
        self._number += 1
        self._documents, self._bytes = [], 0

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):  # keep what was extracted
            self.close()
        else:
            self._pool.shutdown()


class FeatureStore:
    """Reads documents by their entries; several threads may read at once. Only the entries are kept in memory.

    The checksum of a document is verified when it is read first. `cache` is a local folder that keeps documents of a
    remote store, up to `cache_bytes`. When it is full, the other documents are read remotely each time: an epoch reads
    every document once, so replacing one cached document by another would save no reads.

    Raises:
        DataError: there is no store, or a document's bytes are damaged.
    """

    def __init__(self, url: str | Path, cache: str | Path | None = None, cache_bytes: int = 64 << 30) -> None:
        self._folder = open_folder(url)
        try:
            data = self._folder.read(MANIFEST)
        except FileNotFoundError as error:
            raise DataError(
                f"{self._folder.url} is not a feature store (no {MANIFEST}); "
                "write one with `eagle-plugin data features`"
            ) from error
        self.manifest = Manifest.from_json(data, f"{self._folder.url}/{MANIFEST}")
        self.entries = read_entries(self._folder)
        self._cache = _Cache(Path(cache), cache_bytes) if cache is not None else None
        self._verified: set[tuple[str, int]] = set()

    def read(self, entry: Entry) -> Document:
        """The document of an entry of this store."""
        data: bytes | bytearray | None = self._cache.read(entry.sha256) if self._cache else None
        if self._cache and data is not None and not self._intact(entry, data):
            self._cache.remove(entry.sha256, len(data))  # a damaged copy is fetched again
            data = None
        if data is None:
            stop = entry.offset + Layout.of(self.manifest, entry.length).size
            try:
                data = self._folder.read(entry.shard, entry.offset, stop)
            except FileNotFoundError as error:
                raise DataError(f"{self._folder.url} has lost {entry.shard}; copy it again or extract again") from error
            if not self._intact(entry, data):
                raise DataError(
                    f"document {entry.id!r} in {self._folder.url}/{entry.shard} does not have its checksum: "
                    "the file is damaged; copy it again, or delete it and extract again"
                )
            if self._cache:
                self._cache.write(entry.sha256, data)
        return decode(entry, data, self.manifest)

    def _intact(self, entry: Entry, data: bytes | bytearray) -> bool:
        place = (entry.shard, entry.offset)
        if place not in self._verified:
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                return False
            self._verified.add(place)
        return len(data) == Layout.of(self.manifest, entry.length).size


class _Cache:
    """A local folder of documents, named by their sha256, with at most about `limit` bytes."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._folder, self._limit = path, LocalFolder(path), limit
        self._lock = threading.Lock()
        self._used, self._unseen = self._measure(), 0

    def _measure(self) -> int:
        return sum((self.path / name).stat().st_size for name in self._folder.names())

    def read(self, name: str) -> bytearray | None:
        try:
            return self._folder.read(name)
        except FileNotFoundError:
            return None

    def remove(self, name: str, size: int) -> None:
        (self.path / name).unlink(missing_ok=True)
        with self._lock:
            self._used -= size

    def write(self, name: str, data: bytes | bytearray) -> None:
        with self._lock:
            if self._unseen > self._limit >> 6:  # other processes may write to the same folder
                self._used, self._unseen = self._measure(), 0
            if self._used + len(data) > self._limit:
                return
            self._used += len(data)
            self._unseen += len(data)
        try:
            self._folder.create(name, data)
        except ObjectExists:
            return


def _check_manifest(folder: Folder, manifest: Manifest) -> None:
    """Write the manifest of a new store; DataError if the store has another one."""
    try:
        folder.create(MANIFEST, manifest.to_json())
        return
    except ObjectExists:
        where = f"{folder.url}/{MANIFEST}"
        found = Manifest.from_json(folder.read(MANIFEST), where)
    if differences := found.differences(manifest):
        raise DataError(
            f"{folder.url} holds features with {'; '.join(differences)}; "
            "give the same target and settings to continue it, or another --store"
        )
