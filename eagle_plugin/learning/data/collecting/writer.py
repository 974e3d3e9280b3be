"""Reads documents from its input and writes them into a feature store: a process beside a server.

Its output has one JSON object per line: first its version, or the sentence why it cannot start; then its counts. It
ends when its input ends, or the server does. Texts never go into its output, its errors or a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.collect.recorder import Facts, bytes_of
from eagle_plugin.collect.settings import STORE, CollectSettings
from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.data.answer_faults import answer_fault
from eagle_plugin.learning.data.collecting.pipe import Ended, Incoming, Pipe
from eagle_plugin.learning.data.collecting.shards import OpenShards, Written
from eagle_plugin.learning.data.dialogues import response_mask
from eagle_plugin.learning.data.rows import MIN_RESPONSE, DataError
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.shards import Document, Entry, Layout, encode_into
from eagle_plugin.learning.data.target_identity import target_digests
from eagle_plugin.traffic.metrics import DROPPED
from eagle_plugin.traffic.writer_process import writer_settings
from eagle_plugin.traffic.writer_program import Run, run_writer

IDLE = 1.0  # seconds without a document after which what there is becomes a shard
TELL_EVERY = 1.0  # seconds between two reports of counts


def main(arguments: list[str]) -> int:
    """Run until the input ends; with the argument `--check` only start."""
    return run_writer(arguments, _start)


def _start(is_check: bool) -> Run:
    os.umask(0o077)  # the states, and the token ids beside them, are for the user of the server
    torch.set_num_threads(1)
    settings = CollectSettings.from_json(writer_settings())
    writer = DocumentWriter(OpenShards(settings.url, manifest_of(settings), settings.shard_mib << 20))
    return lambda server: writer.run(Pipe(sys.stdin.fileno(), server))


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


def fault_of(found: Facts, max_length: int) -> str:
    """The kind of fault for which a request is dropped; "" if its document is stored."""
    if not found.given and (fault := answer_fault(found.ids[found.prompt :])):
        return fault[0].replace(" ", "_")
    n = min(len(found.ids), max_length)
    if n - found.prompt < MIN_RESPONSE:
        return "too_short"
    return "" if found.rows == n else "incomplete"


def entry_of(found: Facts) -> Entry:
    """What the store says of a document."""
    marked = sum(end - begin for begin, end in answers_of(found))
    return Entry(found.id, found.source, found.split, "", 0, found.rows, marked, "")


def answers_of(found: Facts) -> list[tuple[int, int]]:
    """Begin and end of each answer, in tokens."""
    return [*found.earlier, (found.prompt, found.rows)]


def document_of(found: Facts, states: Tensor, manifest: Manifest) -> Document:
    """The document of states [n * (A + 1) * H], those of the aux layers before the last ones."""
    n = found.rows
    ids, mask = torch.tensor(found.ids[:n]), response_mask(answers_of(found), n)
    aux, last = states.split([len(states) - n * manifest.hidden_size, n * manifest.hidden_size])
    parts = aux.view(n, -1) if len(aux) else None, last.view(n, -1)
    return Document(found.id, found.source, found.split, ids, mask, *parts)


def write_ids(found: Facts, manifest: Manifest, place: memoryview) -> None:
    """Write what is before and after the states of a document in bfloat16: its tokens and its mask."""
    n = found.rows
    np.frombuffer(place[: 4 * n], np.int32)[:] = found.ids[:n]
    mask = np.frombuffer(place[-Layout.of(manifest, n).parts[-1][3] :], np.uint8)
    mask[:n], mask[n:] = response_mask(answers_of(found), n).numpy(), 0


class DocumentWriter:
    """Checks and writes documents, and counts what becomes of them."""

    def __init__(self, shards: OpenShards) -> None:
        self._shards, self._manifest = shards, shards.manifest
        self.counts: Counter[str] = Counter()  # names as in collect/metrics.py
        self._frames = 0
        self._told: Counter[str] | None = None
        self._told_at = 0.0

    def run(self, pipe: Pipe) -> None:
        """Write until the pipe ends."""
        with contextlib.suppress(Ended):
            while True:
                frame = pipe.next(IDLE / 4)
                if frame is not None:
                    self._take(frame, pipe)
                elif self._shards.waiting and self._shards.idle_for() >= IDLE:
                    self._shards.send_on()
                self._count(self._shards.written())
                self._tell()
        self._shards.send_on()
        self._count(self._shards.written(all=True))
        self._tell(now=True)

    def _take(self, frame: Incoming, pipe: Pipe) -> None:
        """Add the document of one frame, or count why not. Raises Ended."""
        self._frames += 1
        found = place = None
        with self._guard():
            found = Facts(**frame.facts)
            if fault := fault_of(found, self._manifest.max_length):
                self.counts[DROPPED + fault] += 1
            elif frame.size != found.rows * self._manifest.states_bytes:
                raise ValueError(frame.size)
            else:
                place = self._shards.place(found.rows)
        if found is None or place is None:
            pipe.skip(frame.size)
            return
        if self._manifest.states == "bfloat16":  # the states are read to where they stay
            pipe.read(place[4 * found.rows :][: frame.size])
            made = partial(write_ids, found, self._manifest, place)
        else:
            states = torch.empty(frame.size // 2, dtype=torch.bfloat16)
            pipe.read(bytes_of(states))
            made = partial(encode_into, document_of(found, states, self._manifest), self._manifest, place)
        with self._guard():
            self._shards.keep(entry_of(found), place, made)
            self.counts["tokens"] += found.rows

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A defect must not end the collection; its message may hold text."""
        try:
            yield
        except Exception as error:
            self.counts[DROPPED + "failed"] += 1
            print(f"eagle-plugin: a document was dropped: {type(error).__name__}", file=sys.stderr)

    def _count(self, written: list[Written]) -> None:
        for one in written:
            if one.error is None:
                self.counts["documents"] += one.documents
                self.counts["bytes"] += one.size
                continue
            if not self.counts[DROPPED + "write_error"]:
                known = isinstance(one.error, (UserError, OSError))
                reason = one.error if known else type(one.error).__name__
                print(f"eagle-plugin: features cannot be written: {reason}", file=sys.stderr, flush=True)
            self.counts[DROPPED + "write_error"] += one.documents

    def _tell(self, now: bool = False) -> None:
        if self.counts == self._told or (not now and time.monotonic() - self._told_at < TELL_EVERY):
            return
        self._told, self._told_at = self.counts.copy(), time.monotonic()
        try:
            print(json.dumps(self.counts | {"exchanges": self._frames}), flush=True)
        except OSError:  # the server is gone
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
