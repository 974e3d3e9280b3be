"""Opens files of prompts: named or from the standard input, plain, gzip or zstandard."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from typing import IO, Any

from eagle_plugin.learning.data.rows import DataError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK = 1 << 20  # bytes of a buffer


def open_raw(path: str) -> IO[bytes]:
    """The file of that name, or the standard input for "-", unbuffered.

    Raises:
        DataError: it cannot be opened.
    """
    try:
        if path == "-":
            if sys.__stdin__ is None:  # closed; its number may be that of another file by now
                raise DataError("the standard input is closed; give files of prompts")
            return open(sys.__stdin__.fileno(), "rb", buffering=0, closefd=False)
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give files of prompts, or - for stdin") from error


class Counted(io.RawIOBase):
    """A raw file that reports how many bytes are read from it, and whose errors name the file."""

    def __init__(self, raw: Any, name: str, on_bytes: Callable[[int], None]) -> None:
        self.raw, self.name, self.on_bytes = raw, name, on_bytes
        self.reported = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = self.raw.readinto(buffer) or 0
        except OSError as error:
            raise DataError(f"{self.name} cannot be read ({error.strerror or error}); copy the file again") from error
        self._report(count)
        return count

    def report_until(self, place: int) -> None:
        """Report the bytes before a place of the file that were not reported yet: another reader has read them."""
        self._report(max(0, place - self.reported))

    def _report(self, count: int) -> None:
        self.reported += count
        self.on_bytes(count)


def decompress(file: io.BufferedReader[Any], name: str) -> io.BufferedReader[Any]:
    """The contents of a gzip or zstandard file, and any other file as it is; told from its first bytes.

    Raises:
        DataError: it needs the package zstandard, which is not installed. Later, a read may find a broken zstandard
            file; broken gzip files raise Python's own errors.
    """
    start = file.peek(4)
    if start.startswith(GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), CHUNK)
    if start.startswith(ZSTD):
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{name} is zstandard-compressed; to read it: pip install zstandard") from error
        return io.BufferedReader(_Zstd(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True), name))
    return file


class _Zstd(io.RawIOBase):
    """A zstandard stream whose errors name the file. (At a cut, the library ends the stream without an error.)"""

    def __init__(self, stream: Any, name: str) -> None:
        self.stream, self.name = stream, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        try:
            return self.stream.readinto(buffer)
        except zstandard.ZstdError as error:
            raise DataError(f"{self.name} is a broken zstandard file ({error}); copy it again") from error
