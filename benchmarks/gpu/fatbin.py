"""The device code inside a CUDA library: what one kind of GPU does not run is replaced by zeros, which compress well.

Sizes and headers stay, so that the library loads as before. A library has one or more sections `.nv_fatbin`, each a row
of fat binaries: a header (magic, version, size of the header, size of all entries), then the entries, each with a
header of its own (kind 1 is PTX and 2 a cubin, at byte 0; the header's size at 4, the code's at 8, the architecture at
28). NVIDIA documents no format; these are the numbers that its libraries have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2


class Entry(NamedTuple):
    """Code for one architecture."""

    kind: int
    architecture: int  # such as 90
    start: int  # of the code in the library
    size: int


def keep_architecture(library: bytearray, architecture: int) -> int:
    """Zero the code for other GPUs in place; returns how many bytes.

    A GPU runs the cubins of its own architecture, and compiles PTX of its own or an older one: the newest of these is
    kept where a fat binary has no cubin for it.
    """
    zeroed = 0
    for binary in _binaries(library):
        kept = [entry for entry in binary if entry.kind == CUBIN and entry.architecture == architecture]
        older = [entry for entry in binary if entry.kind == PTX and entry.architecture <= architecture]
        if not kept and older:
            kept = [max(older, key=lambda entry: entry.architecture)]
        for entry in binary:
            if entry not in kept:
                library[entry.start : entry.start + entry.size] = bytes(entry.size)
                zeroed += entry.size
    return zeroed


def _binaries(library: bytearray) -> Iterator[list[Entry]]:
    """The entries of each fat binary."""
    for place, end in _sections(library, b".nv_fatbin"):
        while place < end:
            magic, _, header, size = struct.unpack_from("<IHHQ", library, place)
            if magic != MAGIC:
                place += 8  # padding
                continue
            at, last = place + header, place + header + size
            entries = []
            while at < last:
                kind, _, own, code = struct.unpack_from("<HHIQ", library, at)
                (architecture,) = struct.unpack_from("<I", library, at + 28)
                entries.append(Entry(kind, architecture, at + own, code))
                at += own + code
            yield entries
            place = last


def _sections(library: bytearray, name: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of the sections of this name in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for header in headers:
        first = strings + header[0]
        if library[first : library.index(b"\0", first)] == name:
            yield header[4], header[4] + header[5]
