"""What the server sends to the writer process through a pipe: exchanges as they were on the wire, and counts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

_HEADER = struct.Struct(">cdII")  # kind, seconds since 1970, bytes of the request, bytes of the answer
_EXCHANGE, _COUNTS = b"E", b"C"


@dataclass(frozen=True)
class Exchange:
    """One request and its whole answer: bodies of HTTP, the answer also as server-sent events."""

    time: float  # seconds since 1970
    request: bytes
    answer: bytes

    def __len__(self) -> int:
        return len(self.request) + len(self.answer)


Frame = Exchange | dict[str, int]


def pack(exchange: Exchange) -> bytes:
    """The exchange as one frame."""
    sizes = len(exchange.request), len(exchange.answer)
    return b"".join([_HEADER.pack(_EXCHANGE, exchange.time, *sizes), exchange.request, exchange.answer])


def pack_counts(counts: Mapping[str, int]) -> bytes:
    """Numbers by name, which the writer keeps beside its segments."""
    text = json.dumps(dict(counts)).encode()
    return _HEADER.pack(_COUNTS, 0.0, len(text), 0) + text


def read_frame(stream: IO[bytes]) -> Frame | None:
    """The next frame; None at the end of the stream, also inside a frame."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, time, *sizes = _HEADER.unpack(header)
    first, second = (stream.read(size) for size in sizes)
    if (len(first), len(second)) != tuple(sizes):
        return None
    return json.loads(first) if kind == _COUNTS else Exchange(time, first, second)
