"""Token rows whose hidden states servers compute while a head is trained: no feature store is needed."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from eagle_plugin.learning.data.collecting.room import SHARE, sent_bytes
from eagle_plugin.learning.data.collecting.servers import Asked, FeatureServers
from eagle_plugin.learning.data.collecting.spool import Spool
from eagle_plugin.learning.data.generation.run import GenerationSettings
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import Document
from eagle_plugin.learning.data.store.features import Readout
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.train.distributed import Ranks
from eagle_plugin.learning.train.recipe import DataSettings
from eagle_plugin.learning.train.row_list import RowList

PAUSE_S = 0.05  # between two looks into the store
PATIENCE_S = 15.0  # without a new document, after the answers; a server writes what it has after a second without more
TIMEOUT_S = 300.0  # of one prefill, in a queue of them
TRIES = 3


class OnlineSource:
    """The rows of a recipe, each sent as one prefill to a server with `EAGLE_FEATURES` when it is needed.

    At most `data.online.ahead` updates are asked for in advance, so that the store and this process hold no more, and
    of them never more than fits into the servers' queues, so that nothing is dropped and computed twice. Held-out
    documents are the same in every evaluation and stay in memory.

    Raises:
        DataError: no server answers, or the store has other documents.
    """

    def __init__(self, settings: DataSettings, manifest: Manifest, readout: Readout, ranks: Ranks) -> None:
        assert settings.online is not None
        self._readout = readout
        self.readers, self.aux_layers = settings.online.ahead, manifest.aux_layers
        self._list = RowList(settings.rows, manifest.vocab_size, manifest.max_length)
        self.items, self.terms = self._list.items, self._list.terms
        self._changed, self._numbers, self._newest = threading.Condition(), itertools.count(), 0.0
        self._closed = False
        self._fault: Exception | None = None
        self._manifest = manifest
        self._waiting: set[str] = set()
        self._came: dict[str, Document] = {}
        self._held_out: dict[int, Document] = {}
        run = ranks.add_up(torch.tensor(0 if ranks.rank else secrets.randbelow(2**31), device=ranks.device))
        on_gpu = ranks.device.type == "cuda"
        self._spool = Spool(settings.online.store, manifest, int(run), ranks.rank, as_stored=on_gpu)
        if ranks.rank == 0:
            self._spool.clear()
        ranks.wait()  # until it is cleared
        concurrency = settings.online.concurrency
        asked = GenerationSettings(concurrency=concurrency, timeout_s=TIMEOUT_S, tries=1, collects=True)
        console = Console(stderr=True, quiet=not ranks.writes)
        self._servers = FeatureServers(settings.online.servers, asked, console, SHARE / ranks.world)
        self._taker = threading.Thread(target=self._take_all, name="feature-store", daemon=True)
        self._taker.start()

    def read(self, indices: Sequence[int]) -> list[Document]:
        """The documents of the rows, as soon as servers have computed them.

        Raises:
            DataError: they do not come.
        """
        with self._changed:
            documents = {i: self._held_out[i] for i in indices if i in self._held_out}
            names = {self._spool.name(next(self._numbers)): i for i in indices if i not in documents}
            self._waiting |= names.keys()
            self._changed.notify_all()
        missing = set(names)
        for _ in range(TRIES):
            self._servers.ask([self._asked(name, names[name]) for name in names if name in missing])
            missing = self._wait(missing)
            if not missing:
                break
            self._servers.forget(missing)
        else:
            row = self._list.rows[names[min(missing)]]
            raise DataError(
                f"{len(missing):,} documents, among them row {row.id!r}, were answered by servers and did not reach "
                f"{self._spool.url}; is it their EAGLE_FEATURES? The servers' logs say what was dropped"
            )
        with self._changed:
            self._waiting -= names.keys()
            for name, i in names.items():
                row = self._list.rows[i]  # the server knows the last one of several answers
                documents[i] = replace(self._came.pop(name), id=row.id, mask=row.mask())
                if self.items[i].split == "val":
                    self._held_out[i] = documents[i]
        return [documents[i] for i in indices]

    def readout(self) -> Readout:
        return self._readout

    def count(self) -> dict[str, dict[str, Any]]:
        return self._list.count()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._servers.close()

    def _asked(self, name: str, index: int) -> Asked:
        row = self._list.rows[index]
        ids = row.ids.tolist()
        return Asked(name, row.source, row.split, ids, row.prompt, sent_bytes(self._manifest, len(ids)))

    def _take_all(self) -> None:
        """Take what comes, also while more is asked for: servers are not asked for more than they have room for."""
        while True:
            with self._changed:
                while not self._closed and len(self._came) == len(self._waiting):
                    self._changed.wait()
                if self._closed:
                    return
            try:
                came = self._spool.take()
            except Exception as error:  # whoever waits raises it
                with self._changed:
                    self._fault = error
                    self._changed.notify_all()
                return
            if not came:
                time.sleep(PAUSE_S)
                continue
            with self._changed:
                self._newest = time.monotonic()
                self._came |= {name: document for name, document in came.items() if name in self._waiting}
                self._changed.notify_all()
            self._servers.came(came)

    def _wait(self, names: Iterable[str]) -> set[str]:
        """Wait for documents; those that have not come although nothing else comes either."""
        answered = time.monotonic()
        with self._changed:
            while not self._closed:
                if self._fault is not None:
                    raise self._fault
                missing = {name for name in names if name not in self._came}
                left = max(answered, self._newest) + PATIENCE_S - time.monotonic()
                if not missing or left <= 0:
                    return missing
                self._changed.wait(left)
        raise DataError("the run has ended")  # read by nobody
