"""The writer's end of the pipe from a server: documents are read into the memory where they stay."""

from __future__ import annotations

import json
import os
import select
from typing import Any, NamedTuple

from eagle_plugin.collect.recorder import DOCUMENT, HEADER
from eagle_plugin.traffic.detached import ServerProcess
from eagle_plugin.traffic.frames import HEADER as COUNTS_HEADER

LOOK_S = 1.0  # between two looks whether the server is there, within a frame
SKIPPED_BYTES = 1 << 20  # of one read of what nobody wants


class Ended(Exception):
    """The server has closed the pipe, perhaps inside a frame, or is gone."""


class Incoming(NamedTuple):
    """A document whose states come next: `Pipe.read` or `Pipe.skip` them."""

    facts: dict[str, Any]
    size: int  # bytes of its states


class Pipe:
    """Reads frames of `collect.recorder`.

    server: a fork of it may hold the pipe open when it is gone. None: nobody looks.
    """

    def __init__(self, file: int, server: ServerProcess | None = None) -> None:
        self._file, self._server = file, server

    def next(self, wait_s: float) -> Incoming | None:
        """The next document; None if none came for so long, or something else. Raises Ended."""
        if not self._comes(wait_s):
            return None
        kind = self._bytes(1)
        if kind != DOCUMENT:
            _, _, *sizes = COUNTS_HEADER.unpack(kind + self._bytes(COUNTS_HEADER.size - 1))
            self.skip(sum(sizes))
            return None
        _, facts, size = HEADER.unpack(kind + self._bytes(HEADER.size - 1))
        return Incoming(json.loads(self._bytes(facts)), size)

    def read(self, place: memoryview) -> None:
        """Fill `place` with what comes next. Raises Ended."""
        while place:
            while not self._comes(LOOK_S):
                pass
            count = os.readv(self._file, [place])
            if not count:
                raise Ended
            place = place[count:]

    def skip(self, size: int) -> None:
        """Leave out what comes next. Raises Ended."""
        nobody = memoryview(bytearray(min(size, SKIPPED_BYTES)))
        while size:
            part = nobody[: min(size, len(nobody))]
            self.read(part)
            size -= len(part)

    def _bytes(self, size: int) -> bytes:
        data = bytearray(size)
        self.read(memoryview(data))
        return bytes(data)

    def _comes(self, wait_s: float) -> bool:
        """Whether something comes, or the end; raises Ended if the server is gone."""
        if select.select([self._file], [], [], wait_s)[0]:
            return True
        if self._server is not None and self._server.is_gone:
            raise Ended
        return False
