"""The queue before the writer of a feature store, and the frames that it sends: one document each.

A frame has the states in the order of a document in a shard, first those of the aux layers and then the last ones: the
writer reads them into their place. Between the host memory of a worker and the pipe no byte is copied.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.collect.settings import STORE, CollectError, CollectSettings
from eagle_plugin.traffic.writer_process import WriterKind, WriterProcess

# The writer is a program of its own: servers import nothing of `learning`.
WRITER = "eagle_plugin.learning.data.collecting.writer"
HEADER = struct.Struct(">cIQ")  # kind, bytes of the facts and of the states
DOCUMENT = b"D"  # its kind; a frame of another kind has the header of `traffic.frames`
LONGEST = 1 << 40  # bytes of one document
TOKEN_BYTES, FACTS_BYTES = 16, 1024  # in the queue, beside the states: of each token, and of a document
PIPE_BYTES = 1 << 20  # what Linux gives to every user; 16 times fewer changes between the two processes


Spans = Sequence[tuple[int, int]]  # begin and end, in tokens


class Rows(NamedTuple):
    """States of adjacent tokens, bfloat16 on the host, each tensor contiguous."""

    aux: Tensor  # [n, A * H]; no columns where the head reads no aux layers
    last: Tensor  # [n, H]

    @property
    def nbytes(self) -> int:
        return self.aux.nbytes + self.last.nbytes

    def first(self, n: int) -> Rows:
        """Those of the first n tokens."""
        return Rows(self.aux[:n], self.last[:n])


class Facts(NamedTuple):
    """What is sent of a document before its states."""

    id: str
    source: str
    split: str
    ids: list[int]  # all tokens, the last one of the answer included
    prompt: int  # tokens before the answer
    given: bool  # whether the answer came with the prompt, and was not generated here
    rows: int  # of the first tokens: those whose states follow
    earlier: Spans = ()  # answers before the last one


@dataclass(frozen=True)
class Collected:
    """One request whose states were seen from its first token on."""

    id: str
    source: str
    split: str
    ids: list[int]  # these as of `Facts`
    prompt: int
    given: bool
    parts: Sequence[Rows]  # of the first tokens, in their order
    earlier: Spans = ()

    @property
    def rows(self) -> int:
        """Tokens whose states are known."""
        return sum(len(part.last) for part in self.parts)

    def __len__(self) -> int:
        """Bytes in the queue, a little more than those of the frame: what clients count with (`collecting.room`)."""
        return sum(part.nbytes for part in self.parts) + TOKEN_BYTES * len(self.ids) + FACTS_BYTES

    def _facts(self) -> bytes:
        facts = Facts(self.id, self.source, self.split, self.ids, self.prompt, self.given, self.rows, self.earlier)
        return json.dumps(facts._asdict(), separators=(",", ":")).encode()

    def frame(self) -> list[bytes | memoryview]:
        """What is sent: the facts, and the states as they are in memory."""
        facts, states = self._facts(), [part.aux for part in self.parts] + [part.last for part in self.parts]
        head = HEADER.pack(DOCUMENT, len(facts), sum(part.nbytes for part in self.parts))
        return [head, facts, *(bytes_of(tensor) for tensor in states if tensor.numel())]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data


class FeatureRecorder(WriterProcess):
    """The writer process of one worker.

    Raises:
        CollectError: it does not start, or the store is of another target.
    """

    def __init__(self, settings: CollectSettings, show: Callable[[Counter[str]], None] = lambda totals: None) -> None:
        """show as of `WriterProcess`."""
        super().__init__(writer_kind(settings), show)


def writer_kind(settings: CollectSettings) -> WriterKind:
    """The writer of a store."""
    command, given = [settings.python or sys.executable, "-m", WRITER], settings.to_json()
    limits = settings.queue_bytes, LONGEST, PIPE_BYTES
    return WriterKind("collection of features", STORE, CollectError, command, given, *limits)
