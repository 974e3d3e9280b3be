"""Passes documents on from servers to a training run: each is read once, and its shard is removed.

The store is one of `EAGLE_FEATURES`, and nothing stays in it. Each process of a run asks for documents of its own, so
that a shard can have those of several processes; the last one to read it removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.contents import SHARD_NAME
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.objects import ObjectExists, open_folder
from eagle_plugin.learning.data.store.plan import PLAN_NAME
from eagle_plugin.learning.data.store.shards import Document, Layout, Shard, ShardDamage, decode, read_shard

_OWN = re.compile(r"(online-[0-9a-f]{8}-\d{3})-\d+")  # a document's id: its process of a run, number of the request
_TAKEN = "taken-"  # before the name of a shard, in the names of empty objects


class Spool:
    """The documents of one process of a run. `run` is the same number in all of them, and in no other run.

    as_stored: states in float8 stay so (`decode`).

    Raises:
        DataError: the store is also used for something else: its documents would be removed.
    """

    def __init__(self, url: str | Path, manifest: Manifest, run: int, rank: int, as_stored: bool = False) -> None:
        self._folder, self._manifest, self._as_stored = open_folder(url), manifest, as_stored
        self._owner = f"online-{run:08x}-{rank:03d}"
        self._seen: set[str] = set()
        if any(PLAN_NAME.fullmatch(name) for name in self._folder.names()):
            raise self._foreign("is a feature store with a plan")

    @property
    def url(self) -> str:
        """The store, as it is shown."""
        return self._folder.url

    def name(self, number: int) -> str:
        """The id of a document that a server is asked for; a number is used once."""
        return f"{self._owner}-{number}"

    def clear(self) -> None:
        """Remove what earlier runs have left; by one process, before any of them asks for documents.

        A run that is not over asks again for what it loses by this.
        """
        names = self._folder.sizes()
        for name in names:
            if SHARD_NAME.fullmatch(name):
                with contextlib.suppress(ShardDamage):
                    self._owners(read_shard(self._folder, name, names[name], self._manifest))
        for name in names:
            if name.startswith(_TAKEN) or SHARD_NAME.fullmatch(name):
                self._remove(name)

    def take(self) -> dict[str, Document]:
        """The documents that have come for this process since the last call, by id."""
        found: dict[str, Document] = {}
        names = {name: size for name, size in self._folder.sizes().items() if SHARD_NAME.fullmatch(name)}
        self._seen &= names.keys()
        for name in sorted(names.keys() - self._seen):
            self._seen.add(name)
            try:
                shard = read_shard(self._folder, name, names[name], self._manifest)
            except ShardDamage:  # or another process has just removed it; what is missing is asked for again
                continue
            owners = self._owners(shard)
            if self._owner in owners:
                found |= self._read(shard)
                self._mark(name, owners)
        return found

    def _owners(self, shard: Shard) -> set[str]:
        """The processes, of any run, that have asked for documents of a shard."""
        owners = set()
        for entry in shard.entries:
            if not (known := _OWN.fullmatch(entry.id)):
                raise self._foreign(f"has the document {entry.id!r}, which no training run has asked for")
            owners.add(known[1])
        return owners

    def _read(self, shard: Shard) -> dict[str, Document]:
        found = {}
        for entry in shard.entries:
            if entry.id.startswith(f"{self._owner}-"):
                stop = entry.offset + Layout.of(self._manifest, entry.length).size
                try:
                    data = self._folder.read(shard.name, entry.offset, stop)
                except FileNotFoundError:  # another run has just begun and cleared the store
                    break
                if hashlib.sha256(data).hexdigest() == entry.sha256:
                    found[entry.id] = decode(entry, data, self._manifest, self._as_stored)
        return found

    def _mark(self, name: str, owners: set[str]) -> None:
        """This process has read a shard; the last of its owners to say so removes it."""
        if owners == {self._owner}:
            self._remove(name)
            return
        with contextlib.suppress(ObjectExists):
            self._folder.create(f"{_TAKEN}{name}-{self._owner}", b"")
        marks = {f"{_TAKEN}{name}-{owner}" for owner in owners}
        if marks <= set(self._folder.names()):
            for one in (name, *marks):
                self._remove(one)

    def _remove(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except DataError:  # gone, if two processes were the last one
            if name in self._folder.names():
                raise

    def _foreign(self, what: str) -> DataError:
        return DataError(
            f"{self.url} {what}: online training removes what it has read; start the servers with an EAGLE_FEATURES of "
            "their own for it"
        )
