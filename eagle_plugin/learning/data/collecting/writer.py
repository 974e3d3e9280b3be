"""Reads documents from its input and writes them into a feature store: a process beside a server.

Its output has one JSON object per line: first its version, or the sentence why it cannot start; then its counts. It
ends when its input ends, or the server does. Texts never go into its output, its errors or a log.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from typing import IO, Any

import torch

import eagle_plugin
from eagle_plugin.collect.recorder import Collected
from eagle_plugin.collect.settings import STORE, CollectSettings
from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.data.answer_faults import answer_fault
from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.rows import MIN_RESPONSE, DataError
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.shards import Document
from eagle_plugin.learning.data.target_identity import target_digests
from eagle_plugin.traffic.detached import ServerProcess, detach
from eagle_plugin.traffic.frames import Exchange, read_frame
from eagle_plugin.traffic.metrics import DROPPED
from eagle_plugin.traffic.writer_process import writer_settings

IDLE = 1.0  # seconds without a document after which what there is becomes a shard
TELL_EVERY = 1.0  # seconds between two reports of counts
READ_AHEAD = 4  # frames


def main(arguments: list[str]) -> int:
    """Run until the input ends; with the argument `--check` only start."""
    leave = None if "--check" in arguments else detach()
    server = ServerProcess()
    os.umask(0o077)  # the states, and the token ids beside them, are for the user of the server
    settings = CollectSettings.from_json(writer_settings())
    for number in (signal.SIGINT, signal.SIGTERM):  # of the server's group; what is queued is written first
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        shards = OpenShards(settings.url, manifest_of(settings), settings.shard_mib << 20)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    if leave is not None:
        leave()
    print(json.dumps({"version": eagle_plugin.__version__}), flush=True)
    if leave is not None:
        DocumentWriter(shards, settings).run(sys.stdin.buffer, server)
    return 0


def manifest_of(settings: CollectSettings) -> Manifest:
    """The manifest of what a server computes.

    Raises:
        DataError: the files of the target are in no folder here.
    """
    facts = settings.facts
    assert facts is not None
    served = facts.served
    try:
        digests: dict[str, Any] = dict(target_digests(served.folder, served.tokenizer, served.chat_template))
    except (DataError, OSError) as error:
        raise DataError(
            f"{served.folder} is no folder with a config.json that can be read, so nothing would say of which target "
            f"the features are; give the server the target's folder, or unset {STORE}"
        ) from error
    return Manifest(
        **digests,
        target=served.name,
        aux_layers=facts.aux_layers,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        states=settings.states,
        max_length=settings.max_length,
        logit_factor=facts.logit_factor,
        softcap=facts.softcap,
    )


def document_of(found: Collected, hidden_size: int, max_length: int) -> Document | str:
    """The document of a request as the store has it, or the kind of fault for which it is dropped."""
    answer = found.ids[found.prompt :]
    if not found.given and (fault := answer_fault(answer)):
        return fault[0].replace(" ", "_")
    n = min(len(found.ids), max_length)
    if n - found.prompt < MIN_RESPONSE:
        return "too_short"
    if len(found.states) < n:
        return "incomplete"
    aux = found.states[:n, :-hidden_size]
    return Document(
        id=found.id,
        source=found.source,
        split=found.split,
        ids=torch.tensor(found.ids[:n]),
        mask=torch.arange(n) >= found.prompt,
        aux=aux if aux.shape[1] else None,
        last=found.states[:n, -hidden_size:],
    )


class DocumentWriter:
    """Checks and writes documents, and counts what becomes of them."""

    def __init__(self, shards: OpenShards, settings: CollectSettings) -> None:
        assert settings.facts is not None
        self._shards, self._hidden, self._max_length = shards, settings.facts.hidden_size, settings.max_length
        self.counts: Counter[str] = Counter()  # names as in collect/metrics.py
        self._frames = 0
        self._told: Counter[str] | None = None
        self._told_at = 0.0

    def run(self, stream: IO[bytes], server: ServerProcess | None = None) -> None:
        """Write until the stream ends, or the server is gone."""
        frames: queue.Queue[Any] = queue.Queue(READ_AHEAD)
        threading.Thread(target=_read_all, args=(stream, frames), daemon=True).start()
        while True:
            try:
                frame = frames.get(timeout=IDLE / 4)
            except queue.Empty:
                if self._shards.waiting and self._shards.idle_for() >= IDLE:
                    self._flush()
                if server is not None and server.is_gone:  # a fork of it may hold the pipe open
                    break
                self._tell()
                continue
            if frame is None:
                break
            if isinstance(frame, Exchange):
                self.write(frame)
            self._tell()
        self._flush()
        self._tell(now=True)

    def write(self, frame: Exchange) -> None:
        """Add the document of one frame; write a shard if it is full."""
        self._frames += 1
        try:
            found = document_of(Collected.of(frame), self._hidden, self._max_length)
            if isinstance(found, str):
                self.counts[DROPPED + found] += 1
                return
            self._shards.add(found)
            self.counts["tokens"] += len(found.ids)
        except Exception as error:  # a defect must not end the collection; its message may hold text
            self.counts[DROPPED + "failed"] += 1
            print(f"eagle-plugin: a document was dropped: {type(error).__name__}", file=sys.stderr)
        if self._shards.is_full:
            self._flush()

    def _flush(self) -> None:
        waiting = self._shards.waiting
        try:
            documents, size = self._shards.flush()
        except (DataError, OSError) as error:
            if not self.counts[DROPPED + "write_error"]:
                print(f"eagle-plugin: features cannot be written: {error}", file=sys.stderr, flush=True)
            self.counts[DROPPED + "write_error"] += waiting
            return
        self.counts["documents"] += documents
        self.counts["bytes"] += size

    def _tell(self, now: bool = False) -> None:
        if self.counts == self._told or (not now and time.monotonic() - self._told_at < TELL_EVERY):
            return
        self._told, self._told_at = self.counts.copy(), time.monotonic()
        try:
            print(json.dumps(self.counts | {"exchanges": self._frames}), flush=True)
        except OSError:  # the server is gone
            return


def _read_all(stream: IO[bytes], frames: queue.Queue[Any]) -> None:
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    frames.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
