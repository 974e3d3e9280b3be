"""Keeps documents of a remote feature store on a local disk."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from eagle_plugin.learning.data.store.objects import LocalFolder, ObjectExists

GIB = 2**30


class DocumentCache:
    """A local folder of documents, named by their sha256, with at most about `limit` bytes.

    The first process of a machine says on stderr, once, when it is full.
    """

    _told: set[Path] = set()  # folders whose end has been told: several stores may share one

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._folder, self._limit = path, LocalFolder(path), limit
        self._lock = threading.Lock()
        self._used, self._unseen = self._measure(), 0

    def _tell(self) -> None:
        if self.path in self._told or os.environ.get("LOCAL_RANK", "0") != "0":
            return
        self._told.add(self.path)
        print(
            f"warning: the cache {self.path} is full ({self._limit / GIB:.6g} GiB): documents that are not in it are "
            "read from their store in every epoch; raise data.cache_gib in the recipe of training",
            file=sys.stderr,
        )

    def _measure(self) -> int:
        return sum((self.path / name).stat().st_size for name in self._folder.names())

    def read(self, name: str) -> bytearray | None:
        """The bytes of a document, or None."""
        try:
            return self._folder.read(name)
        except FileNotFoundError:
            return None

    def remove(self, name: str, size: int) -> None:
        """Remove a document of so many bytes."""
        (self.path / name).unlink(missing_ok=True)
        with self._lock:
            self._used -= size

    def write(self, name: str, data: bytes | bytearray) -> None:
        """Keep a document while there is room."""
        with self._lock:
            if self._unseen > self._limit >> 6:  # other processes may write to the same folder
                self._used, self._unseen = self._measure(), 0
            if self._used + len(data) > self._limit:
                self._tell()
                return
            self._used += len(data)
            self._unseen += len(data)
        try:
            self._folder.create(name, data)
        except ObjectExists:
            return
