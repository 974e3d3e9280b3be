"""Writes documents into a feature store as they come, beside other servers that do the same.

There is no plan before the first document. So each shard has the number of the plan that comes next, and the store is
not whole until `completion` has recorded that plan. A shard is named by the time, so that no name comes twice, also
where another server's shard, or one that was read and removed, had it before.

The documents of a shard lie one after another in one piece of memory, where they are made, hashed and written from. The
memory is used again. Threads hash documents and write whole shards while the next one grows.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import check_manifest
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import Folder, LocalFolder, ObjectExists, open_folder
from eagle_plugin.learning.data.store.plan import PLAN_NAME
from eagle_plugin.learning.data.store.shards import Entry, Layout, write_shard

RANK = 999  # in the names of these shards: `data features` has ranks from 0 on
LEAST_FREE = 1 << 30  # bytes of a disk that a store leaves: others of the machine need them
RETRIES = 100  # of a name that another server has taken in the same millisecond
THREADS = 4  # that hash and write


class Written(NamedTuple):
    """What became of a shard."""

    documents: int
    size: int  # bytes of its documents
    error: Exception | None  # it was not written


class _Shard:
    """A shard that grows."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.used = memory, 0
        self.documents: list[tuple[Entry, memoryview, Future[str]]] = []


def check_room(folder: Folder, size: int) -> None:
    """Raises DataError where so many bytes would fill the disk of a store; of an object store nobody knows."""
    if not isinstance(folder, LocalFolder):
        return
    try:
        free = shutil.disk_usage(folder.path).free
    except OSError:  # of a folder that does not exist yet, for instance; writing has its own error
        return
    if free < LEAST_FREE + size:
        raise DataError(
            f"the disk of {folder.path} has {free / 2**20:,.0f} MiB left, of which a store leaves "
            f"{LEAST_FREE >> 20:,}; make room there"
        )


class OpenShards:
    """The shards of one server. Made for one thread, which adds documents: `place`, then `keep`.

    Raises:
        DataError: the store is of another target or other settings, or it cannot be written.
    """

    def __init__(
        self, url: str, manifest: Manifest, shard_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self.manifest, self._shard_bytes, self._clock = open_folder(url), manifest, shard_bytes, clock
        check_manifest(self._folder, manifest)
        self._pool = ThreadPoolExecutor(THREADS, "shards")
        self._open: _Shard | None = None
        self._free: list[np.ndarray] = []  # memory of shards that were written
        self._writing: list[Future[Written]] = []
        self._newest = 0.0
        self._naming, self._last = threading.Lock(), 0  # number of the newest shard

    @property
    def waiting(self) -> int:
        """Documents of the shard that grows."""
        return len(self._open.documents) if self._open else 0

    def idle_for(self) -> float:
        """Seconds since the last document came."""
        return self._clock() - self._newest

    def place(self, n: int) -> memoryview:
        """Memory for a document of n tokens, for `keep`; what was placed before and not kept is lost.

        A shard that it does not fit in is given to the threads, which may have to be waited for.
        """
        size = Layout.of(self.manifest, n).size
        if self._open is not None and self._open.used + size > len(self._open.memory):
            self.send_on()
        if self._open is None:
            self._open = _Shard(self._memory(max(size, self._shard_bytes)))
        return self._open.memory.data[self._open.used : self._open.used + size]

    def keep(self, entry: Entry, place: memoryview, made: Callable[[], None] = lambda: None) -> None:
        """Add the document that is in this place, or that `made` writes there, in a thread."""
        assert self._open is not None

        def digest() -> str:
            made()
            return hashlib.sha256(place).hexdigest()

        self._open.documents.append((entry, place, self._pool.submit(digest)))
        self._open.used += len(place)
        self._newest = self._clock()
        if self._open.used >= self._shard_bytes:
            self.send_on()

    def send_on(self) -> None:
        """Let the threads write what there is; waits if they have too much already."""
        shard, self._open = self._open, None
        if shard is None or not shard.documents:
            return
        unfinished = [future for future in self._writing if not future.done()]
        if len(unfinished) >= THREADS:
            unfinished[0].result()
        self._writing.append(self._pool.submit(self._write, shard))

    def written(self, all: bool = False) -> list[Written]:
        """The shards that the threads have finished since the last call. all: that they have, after a wait."""
        done = [future for future in self._writing if all or future.done()]
        self._writing = [future for future in self._writing if future not in done]
        return [future.result() for future in done]

    def _memory(self, size: int) -> np.ndarray:
        for i, memory in enumerate(self._free):
            if len(memory) >= size:
                return self._free.pop(i)
        return np.empty(size, np.uint8)  # not zeros: no page is touched before it is used

    def _write(self, shard: _Shard) -> Written:
        error: Exception | None = None
        # Digests come before this in the threads' order, so none waits for a thread that this one keeps.
        wait([digest for *_, digest in shard.documents])  # all of them: the memory is used again, whatever fails
        try:
            documents = [(replace(entry, sha256=digest.result()), place) for entry, place, digest in shard.documents]
            self._name_and_write(documents)
        except Exception as fault:  # whoever asks for the shard is told
            error = fault
        found = Written(len(shard.documents), shard.used, error)
        shard.documents.clear()
        if len(shard.memory) <= self._shard_bytes:
            self._free.append(shard.memory)
        return found

    def _name_and_write(self, documents: list[tuple[Entry, memoryview]]) -> None:
        check_room(self._folder, sum(len(place) for _, place in documents))
        names = (PLAN_NAME.fullmatch(name) for name in self._folder.names())
        plan = 1 + max((int(one[1]) for one in names if one), default=-1)
        for tried in range(RETRIES):
            with self._naming:
                self._last = number = max(self._last + 1, time.time_ns() // 1_000_000)
            try:
                name = f"shard-{RANK:03d}-{number:06d}.safetensors"
                return write_shard(self._folder, name, documents, self.manifest, plan)
            except ObjectExists:
                if tried == RETRIES - 1:
                    raise
