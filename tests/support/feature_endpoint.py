"""An HTTP server that stores hidden states as a server with `EAGLE_FEATURES` does: those of a store that is there."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kept_documents import keep_document, write_kept
from token_endpoint import TokenEndpoint

from eagle_plugin.collect.settings import COLLECTS_HEADER, QUEUE_HEADER
from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.generation.endpoints import FIELD
from eagle_plugin.learning.data.store.feature_store import Document, FeatureStore

IDLE_S = 0.05  # without a document, after which those that wait are written
BOUNDED_IDLE_S = 0.5  # the same of a bounded queue, which is to fill also on a busy machine
Change = Callable[[Document, int], "Document | None"]


class FeatureEndpoint(TokenEndpoint):
    """Writes into `spool` the documents of `store` whose tokens it is asked for.

    change: gets a document and how many there were before; what is written in its place, or None for nothing.
    queue: bytes of documents that wait; what comes on top is dropped, and counted in `dropped`.
    told: whether answers say so.
    """

    def __init__(
        self,
        store: Path,
        spool: Path,
        change: Change = lambda document, before: document,
        port: int = 0,
        queue: int | None = None,
        told: bool = True,
    ):
        says = {QUEUE_HEADER: str(queue)} if queue is not None and told else {}
        super().__init__(behaviour=self._store, headers={COLLECTS_HEADER: "on", **says}, port=port)
        known = FeatureStore(store)
        self._known = {tuple(document.ids.tolist()): document for document in map(known.read, known.entries)}
        self._shards = OpenShards(str(spool), known.manifest, 1 << 30)
        self._change, self._lock, self._ended = change, threading.Lock(), threading.Event()
        self._longest, self.asked = known.manifest.max_length, 0
        self._queue, self._queued, self.dropped = queue, 0, 0
        self._idle_s = IDLE_S if queue is None else BOUNDED_IDLE_S

    def __enter__(self) -> FeatureEndpoint:
        threading.Thread(target=self._flush_when_idle, daemon=True).start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        super().__exit__(*error)

    def _store(self, path: str, body: dict[str, Any]) -> list[int]:
        asked = body[FIELD]["features"]
        if "given" not in asked:  # the first request, whose answer is too short
            return [3]
        with self._lock:
            document = self._known[tuple(body["prompt"][: self._longest])]
            assert int(document.mask.sum()) == len(document.ids) - asked["given"]
            named = dataclasses.replace(document, id=asked["id"], source=asked["source"], split=asked["split"])
            changed = self._change(named, self.asked)
            self.asked += 1
            if changed is not None and self._has_room(changed):
                keep_document(self._shards, changed)
        return [3]

    def _flush_when_idle(self) -> None:
        while not self._ended.wait(self._idle_s / 2):
            with self._lock:
                if self._shards.waiting and self._shards.idle_for() >= self._idle_s:
                    write_kept(self._shards)
                    self._queued = 0

    def _has_room(self, document: Document) -> bool:
        assert document.aux is not None
        size = 2 * (document.aux.numel() + document.last.numel()) + len(str(document.ids.tolist())) + 200
        if self._queue is not None and self._queued + size > self._queue:
            self.dropped += 1
            return False
        self._queued += size
        return True


def shifted(document: Document, before: int) -> Document:
    """A fault: the states of the token before."""
    assert document.aux is not None
    return dataclasses.replace(document, aux=document.aux.roll(1, 0), last=torch.roll(document.last, 1, 0))
