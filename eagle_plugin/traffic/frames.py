"""What the server sends to the writer process through a pipe: exchanges as they were on the wire, and counts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

HEADER = struct.Struct(">cdIII")  # kind, seconds since 1970, bytes of the request, the answer and what is known of it
_EXCHANGE, _COUNTS = b"E", b"C"


@dataclass(frozen=True)
class Exchange:
    """One request and its whole answer: bodies of HTTP, the answer also as server-sent events."""

    time: float  # seconds since 1970
    request: bytes
    answer: bytes
    route: str = ""  # of the request; those of chats and completions need none
    domain: str = ""  # that the client named
    # Rounds that accepted exactly 0, 1, 2, ... drafts, where the engine tells it beside the answer.
    accepted_drafts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request) + len(self.answer)

    def frame(self) -> list[bytes]:
        """What is sent, in parts."""
        return [pack(self)]


Frame = Exchange | dict[str, int]


def pack(exchange: Exchange) -> bytes:
    """The exchange as one frame."""
    given: dict[str, Any] = {name: getattr(exchange, name) for name in ("route", "domain", "accepted_drafts")}
    beside = json.dumps({name: value for name, value in given.items() if value}).encode()
    parts = exchange.request, exchange.answer, beside
    return b"".join([HEADER.pack(_EXCHANGE, exchange.time, *map(len, parts)), *parts])


def pack_counts(counts: Mapping[str, int]) -> bytes:
    """Numbers by name, which the writer keeps beside its segments."""
    text = json.dumps(dict(counts)).encode()
    return HEADER.pack(_COUNTS, 0.0, len(text), 0, 0) + text


def read_frame(stream: IO[bytes]) -> Frame | None:
    """The next frame; None at the end of the stream, also inside a frame."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    kind, time, *sizes = HEADER.unpack(header)
    first, second, beside = (stream.read(size) for size in sizes)
    if [len(first), len(second), len(beside)] != sizes:
        return None
    return json.loads(first) if kind == _COUNTS else Exchange(time, first, second, **json.loads(beside))
