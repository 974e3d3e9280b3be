"""Writes documents into a feature store as they come, beside other servers that do the same.

There is no plan before the first document. So each shard has the number of the plan that comes next, and the store is
not whole until `completion` has recorded that plan. A shard is named by the time, so that no name comes twice, also
where another server's shard, or one that was read and removed, had it before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import check_manifest
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import Folder, LocalFolder, ObjectExists, open_folder
from eagle_plugin.learning.data.store.plan import PLAN_NAME
from eagle_plugin.learning.data.store.shards import Document, Entry, encode, write_shard

RANK = 999  # in the names of these shards: `data features` has ranks from 0 on
LEAST_FREE = 1 << 30  # bytes of a disk that a store leaves: others of the machine need them
RETRIES = 100  # of a name that another server has taken in the same millisecond


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
    """The shards of one server; `flush` writes what was added.

    Raises:
        DataError: the store is of another target or other settings, or it cannot be written.
    """

    def __init__(
        self, url: str, manifest: Manifest, shard_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._manifest, self._shard_bytes, self._clock = open_folder(url), manifest, shard_bytes, clock
        check_manifest(self._folder, manifest)
        self._documents: list[tuple[Entry, bytes]] = []
        self._bytes, self._newest = 0, 0.0
        self._last = 0  # number of the newest shard

    @property
    def waiting(self) -> int:
        """Documents that are not written yet."""
        return len(self._documents)

    @property
    def is_full(self) -> bool:
        """Whether they are enough for a shard."""
        return self._bytes >= self._shard_bytes

    def idle_for(self) -> float:
        """Seconds since the last document came."""
        return self._clock() - self._newest

    def add(self, document: Document) -> None:
        """Keep a document for the next shard."""
        data = encode(document, self._manifest)
        marked = int(document.mask.sum())
        entry = Entry(document.id, document.source, document.split, "", 0, len(document.ids), marked, "")
        self._documents.append((entry, data))
        self._bytes += len(data)
        self._newest = self._clock()

    def flush(self) -> tuple[int, int]:
        """Write all documents into one shard; how many there were, and their bytes.

        Raises:
            DataError: it cannot be written; the documents are gone.
        """
        documents, size = self._documents, self._bytes
        if not documents:
            return 0, 0
        self._documents, self._bytes = [], 0
        check_room(self._folder, size)
        found = (PLAN_NAME.fullmatch(name) for name in self._folder.names())
        plan = 1 + max((int(one[1]) for one in found if one), default=-1)
        first = max(self._last + 1, time.time_ns() // 1_000_000)
        for number in range(first, first + RETRIES):
            self._last, name = number, f"shard-{RANK:03d}-{number:06d}.safetensors"
            try:
                write_shard(self._folder, name, documents, self._manifest, plan)
                break
            except ObjectExists:
                if number == first + RETRIES - 1:
                    raise
        return len(documents), size
