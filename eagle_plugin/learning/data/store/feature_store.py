"""The feature store: the hidden states of a target for each document, in shards below one URL.

    manifest.json                        what the features were made from
    plan-{number:03}-{rank:03}.json      which shards there must be
    shard-{rank:03}-{number:06}.safetensors

A shard has its documents, their index and their digests in one object, which is written whole or not at all: after a
kill there is nothing to repair, and no process changes what another one wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from eagle_plugin.learning.data.provenance import Sources, Terms
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.contents import (
    REPAIR,
    SHARD_NAME,
    Contents,
    check_contents,
    plans_of_run,
    read_contents,
)
from eagle_plugin.learning.data.store.document_cache import DocumentCache
from eagle_plugin.learning.data.store.manifest import MANIFEST, Manifest
from eagle_plugin.learning.data.store.objects import Folder, LocalFolder, ObjectExists, open_folder
from eagle_plugin.learning.data.store.plan import Content, Plan, Run, create_plan
from eagle_plugin.learning.data.store.shards import (
    Document,
    Entry,
    Layout,
    ShardDamage,
    decode,
    encode,
    read_in_full,
    write_shard,
)
from eagle_plugin.learning.data.store.sources import add_sources, stored_sources

__all__ = ["ROWS_CHANGED", "SHARD_BYTES", "Document", "Entry", "FeatureStore", "FeatureWriter"]

SHARD_BYTES = 256 << 20
CACHE_GIB = 64
ROWS_CHANGED = "the row file changed during the extraction; run again when nothing writes to it any more"


class FeatureWriter:
    """Writes the shards of one process of an extraction; the same run again writes those that are missing or damaged.

    First `plan` fixes which documents are in which shard. Then, for every name in `missing`, `add` its documents in
    their order and `finish` it. `damaged` says of some of these what is wrong with them. Shards are written in the
    background, one at a time. Processes that write at the same time must have different ranks.

    `earlier` has the ids of the documents that other row files, or other options, have put into the store: do not plan
    these again.

    Raises:
        DataError: the store was made from another target or with other settings, a shard of another run is damaged, a
            document has the wrong shape, or writing failed.
    """

    def __init__(self, url: str | Path, manifest: Manifest, run: Run) -> None:
        self.manifest, self.run = manifest, run
        self._folder = open_folder(url)
        check_manifest(self._folder, manifest)
        if isinstance(self._folder, LocalFolder):
            self._folder.remove_partial(f"shard-{run.rank:03d}-")
        found = self._contents = read_contents(self._folder)
        self._number, same = plans_of_run(found, run)
        self._own = same.get(run.rank)
        current = {content.name for plan in same.values() for content in plan.shards}
        _refuse_damage(self._folder, found, current)
        others = [Content.found(found.shards[name]) for name in sorted(found.shards.keys() - current)]
        self._earlier = self._own.earlier if self._own else others
        self.earlier = {entry.id for content in self._earlier for entry in found.shards[content.name].entries}
        self.missing: set[str] = set()
        self.damaged: dict[str, str] = {}
        self._planned: dict[str, Content] = {}
        self._documents: list[tuple[Entry, bytes | bytearray | memoryview]] = []
        self._pool = ThreadPoolExecutor(1, "feature-writer")
        self._pending: Future[None] | None = None

    def plan(self, shards: Iterable[Sequence[str]]) -> None:
        """Record the ids of the documents of every shard, before the first shard is written.

        Raises:
            DataError: the plan of this run is there, and it has other documents.
        """
        first = self._first_number()
        contents = [
            Content.of(f"shard-{self.run.rank:03d}-{first + k:06d}.safetensors", ids) for k, ids in enumerate(shards)
        ]
        if self._own is None:
            digest = self.manifest.digest()
            self._own = Plan(
                self._number, self.run.rank, self.run.world, self.run.digest, digest, self._earlier, contents
            )
            create_plan(self._folder, self._own)
        elif self._own.shards != contents:
            raise DataError(
                f"{self._folder.url}/{self._own.name} plans other shards for the same rows and options; "
                "extract the features into another --store"
            )
        self._planned = {content.name: content for content in contents}
        found = self._contents
        self.missing = set(self._planned) - (found.shards.keys() - found.problems.keys())
        self.damaged = {name: found.problems[name] for name in self.missing & found.names}

    def add_sources(self, rows: str | Path) -> None:
        """Record the sources of the file of rows."""
        add_sources(self._folder, rows, {entry.source for entry in self._contents.entries})

    @property
    def names(self) -> list[str]:
        """The names of the planned shards, in the order of writing."""
        return list(self._planned)

    def verify(self) -> Iterator[tuple[int, int]]:
        """Read the shards of the plan that are there in full, and add the damaged ones to `missing`.

        Yields (bytes read, bytes of all these shards) after every request.
        """
        shards = [self._contents.shards[name] for name in self._planned if name not in self.missing]
        before, total = 0, sum(shard.size for shard in shards)
        for shard in shards:
            done = before
            try:
                for size in read_in_full(self._folder, shard, self.manifest):
                    done += size
                    yield done, total
            except ShardDamage as damage:
                self.missing.add(shard.name)
                self.damaged[shard.name] = str(damage)
            before += shard.size
            yield before, total

    def add(self, document: Document) -> None:
        """Add a document to the shard that is written next."""
        data = encode(document, self.manifest)
        n, marked = len(document.ids), int(document.mask.sum())
        self._documents.append((Entry(document.id, document.source, document.split, "", 0, n, marked, ""), data))

    def finish(self, name: str) -> None:
        """Write the shard of the documents that were added; it is on disk after the next `finish`, or after `close`.

        Raises:
            DataError: they are not the documents that were planned.
        """
        self._wait()
        documents, self._documents = self._documents, []
        if Content.of(name, [entry.id for entry, _ in documents]) != self._planned[name]:
            raise DataError(ROWS_CHANGED)
        replaces = name in self._contents.names
        self._pending = self._pool.submit(
            write_shard, self._folder, name, documents, self.manifest, self._number, replaces
        )

    def close(self) -> None:
        """Wait until the last finished shard is on disk."""
        try:
            self._wait()
        finally:
            self._pool.shutdown()

    def _first_number(self) -> int:
        """The number of this run's first shard: after all that this rank has written or planned before."""
        if self._own is not None and self._own.shards:
            return int(SHARD_NAME.fullmatch(self._own.shards[0].name)[2])  # type: ignore[index]
        plans = self._contents.plans.values()
        names = self._contents.names | {c.name for plan in plans for c in (*plan.earlier, *plan.shards)}
        found = [match for name in names if (match := SHARD_NAME.fullmatch(name))]
        return 1 + max((int(match[2]) for match in found if int(match[1]) == self.run.rank), default=-1)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # finished shards are kept, a part of one is not: only whole shards are the same in every run
            self._pool.shutdown()


class FeatureStore:
    """Reads documents by their entries; several threads may read at once. Only the entries are kept in memory.

    At the start, existence, size and header of every shard are checked; the sha256 of a document when it is read first
    (`eagle-plugin data verify` reads all of them). `cache` is a local folder that keeps documents of a remote store, up
    to `cache_bytes`. When it is full, a warning says so, and the other documents are read remotely each time: an epoch
    reads every document once, so replacing one cached document by another would save no reads.

    Raises:
        DataError: there is no store, a shard is missing or damaged, or a document's bytes are damaged.
    """

    def __init__(self, url: str | Path, cache: str | Path | None = None, cache_bytes: int = CACHE_GIB << 30) -> None:
        self._folder = open_folder(url)
        contents = read_contents(self._folder)
        check_contents(contents, self._folder.url)
        self.manifest, self.entries = contents.manifest, contents.entries
        self._sources = stored_sources(self._folder)
        self._cache = DocumentCache(Path(cache), cache_bytes) if cache is not None else None
        self._verified: set[tuple[str, int]] = set()

    def terms(self) -> Sources:
        """The terms of every source of the documents."""
        return {entry.source: self._sources.get(entry.source, Terms()) for entry in self.entries}

    def read(self, entry: Entry, as_stored: bool = False) -> Document:
        """The document of an entry of this store; as_stored: see `decode`."""
        data: bytes | bytearray | None = self._cache.read(entry.sha256) if self._cache else None
        if self._cache and data is not None and not self._intact(entry, data):
            self._cache.remove(entry.sha256, len(data))  # a damaged copy is fetched again
            data = None
        if data is None:
            stop = entry.offset + Layout.of(self.manifest, entry.length).size
            try:
                data = self._folder.read(entry.shard, entry.offset, stop)
            except FileNotFoundError as error:
                raise DataError(f"{self._folder.url} has lost {entry.shard}; {REPAIR}") from error
            if not self._intact(entry, data):
                raise DataError(
                    f"document {entry.id!r} in {self._folder.url}/{entry.shard} does not have its sha256: "
                    f"the file is damaged; {REPAIR}"
                )
            if self._cache:
                self._cache.write(entry.sha256, data)
        return decode(entry, data, self.manifest, as_stored)

    def _intact(self, entry: Entry, data: bytes | bytearray) -> bool:
        place = (entry.shard, entry.offset)
        if place not in self._verified:
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                return False
            self._verified.add(place)
        return len(data) == Layout.of(self.manifest, entry.length).size


def _refuse_damage(folder: Folder, found: Contents, current: set[str]) -> None:
    """Raise DataError if this run cannot write again what is damaged: the manifest, or a shard of another run."""
    if MANIFEST in found.problems:
        raise DataError(f"{folder.url}/{MANIFEST} {found.problems[MANIFEST]}; copy it again, or give another --store")
    for name in sorted(found.problems.keys() & found.names - current):
        if SHARD_NAME.fullmatch(name):
            raise DataError(
                f"{folder.url}/{name} {found.problems[name]}, and other rows or options than these wrote it; "
                "delete it and run again: those of its documents that are in the row file are then extracted again"
            )


def check_manifest(folder: Folder, manifest: Manifest) -> None:
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
