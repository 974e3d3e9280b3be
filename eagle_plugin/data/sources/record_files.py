"""Reads files of JSON objects one by one, with their places: JSON lines, arrays, gzip, zstandard, Parquet."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eagle_plugin.data.rows import DataError

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
CHUNK = 1 << 20
# An array is decoded from a window that is extended until a record is complete. If a record has more characters than
# this, the file is taken for broken.
LARGEST_RECORD = 1 << 28
CUT = "the file is cut off here"


@dataclass(frozen=True)
class LocatedObject:
    """One JSON object and its place in a file."""

    where: str  # `file:line`
    value: dict[str, Any]


@dataclass(frozen=True)
class SkippedRecord:
    """A record that was left out; records are counted by reason."""

    where: str
    reason: str


def read_objects(path: str, on_bytes: Callable[[int], None] | None = None) -> Iterator[LocatedObject | SkippedRecord]:
    """Yield the JSON objects of a file in constant memory; the kind of file is detected from its first bytes.

    If a file ends inside its last record, the records before it are read, and a `SkippedRecord` with reason `CUT`
    names the place.

    Args:
        path: a file, or "-" for the standard input.
        on_bytes: called with the number of bytes taken from the file (before decompression), for a progress bar.

    Raises:
        DataError: naming file and line, the file is not made of JSON objects, or the package that reads it is missing.
    """
    name = "<stdin>" if path == "-" else path
    with _open(path) as raw:
        file = io.BufferedReader(_Counted(raw, on_bytes or (lambda count: None)), CHUNK)
        if file.peek(4).startswith(PARQUET):
            yield from _read_parquet(path, name, on_bytes or (lambda count: None))
            return
        stream = _decompress(file, name)
        try:
            first = _first_character(stream)
            yield from _read_array(stream, name) if first == b"[" else _read_lines(stream, name)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{name} is a broken gzip file ({error}); copy it again") from error


def _open(path: str) -> IO[bytes]:
    if path == "-":
        return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give files of prompts, or - for stdin") from error


class _Counted(io.RawIOBase):
    """A raw file that reports how many bytes are read from it."""

    def __init__(self, raw: Any, on_bytes: Callable[[int], None]) -> None:
        self.raw, self.on_bytes = raw, on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer) or 0
        self.on_bytes(count)
        return count


def _decompress(file: io.BufferedReader[Any], name: str) -> io.BufferedReader[Any]:
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


def _first_character(stream: io.BufferedReader) -> bytes:
    start = stream.peek(64)
    if start.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
        start = stream.peek(64)
    return start.lstrip()[:1]


def _read_lines(stream: io.BufferedReader, name: str) -> Iterator[LocatedObject | SkippedRecord]:
    for number, line in enumerate(stream, 1):
        where = f"{name}:{number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n") and number > 1:
                yield SkippedRecord(where, CUT)
                return
            raise DataError(
                f"{where} is not JSON ({error}); wanted one JSON object per line, or one JSON array"
            ) from error
        yield LocatedObject(where, _require_object(value, where))


def _read_array(stream: io.BufferedReader, name: str) -> Iterator[LocatedObject | SkippedRecord]:
    """Decode an array record by record, from a window of text that moves through the file."""
    decode = json.JSONDecoder().raw_decode
    window = _Window(stream, name)
    window.skip_space()
    window.move(1)  # the bracket
    first = True
    while window.skip_space() != "]":
        if not first and window.skip_space() == ",":
            window.move(1)
            window.skip_space()
        elif not first and not window.ended:
            raise DataError(f"{name}:{window.line} has no comma between two records; repair the array there")
        where = f"{name}:{window.line}"
        while True:
            if window.ended:
                yield SkippedRecord(where, CUT)
                return
            try:
                value, stop = decode(window.text, window.at)
                break
            except json.JSONDecodeError as error:
                if not _may_be_cut(error, window):
                    line = window.line + window.text.count("\n", window.at, error.pos)
                    raise DataError(f"{name}:{line} is not JSON ({error.msg}); repair the array there") from error
                if not window.extend():
                    yield SkippedRecord(where, CUT)
                    return
            except RecursionError as error:
                raise DataError(f"{where} is nested too deeply to be a prompt; remove that record") from error
        window.move(stop - window.at)
        first = False
        yield LocatedObject(where, _require_object(value, where))


def _may_be_cut(error: json.JSONDecodeError, window: _Window) -> bool:
    """Whether the error can be due to text that is not in the window yet: an open string, or an error at its end."""
    at_end = error.pos >= len(window.text) - 16
    return (at_end or error.msg.startswith("Unterminated string")) and len(window.text) < LARGEST_RECORD


class _Window:
    """The part of a text file that is in memory, a position in it, and the line number of that position."""

    def __init__(self, stream: io.BufferedReader, name: str) -> None:
        self.stream, self.name = stream, name
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.line = "", 0, 1

    @property
    def ended(self) -> bool:
        """Whether the position is at the end of the file."""
        return self.at >= len(self.text) and not self.extend()

    def extend(self) -> bool:
        """Read more text; False at the end of the file.

        The text before the position is dropped. As much is read as is left, so that a long record costs linear time.
        """
        self.text, self.at = self.text[self.at :], 0
        while data := self.stream.read(max(CHUNK, len(self.text))):
            try:
                # If the file ends inside a character, its bytes are dropped, like the incomplete record around it.
                more = self.decoder.decode(data)
            except UnicodeDecodeError as error:
                raise DataError(f"{self.name} is not UTF-8 after line {self.line}; convert it to UTF-8") from error
            if more:
                self.text += more
                return True
        return False

    def move(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def skip_space(self) -> str:
        """Move past white space; returns the next character, "" at the end of the file."""
        while not self.ended:
            space = _SPACE.match(self.text, self.at)
            self.move(space.end() - self.at if space else 0)
            if self.at < len(self.text):
                return self.text[self.at]
        return ""


_SPACE = re.compile(r"[ \t\r\n]*")


def _read_parquet(path: str, name: str, on_bytes: Callable[[int], None]) -> Iterator[LocatedObject]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{name} is a Parquet file; to read it: pip install pyarrow, or write JSON lines") from error
    if path == "-":
        raise DataError("Parquet cannot be read from stdin; give the file's name")
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield LocatedObject(
                    f"{name}:row {number}", {key: value for key, value in row.items() if value is not None}
                )
    except pyarrow.ArrowException as error:
        raise DataError(f"{name} is a broken Parquet file after row {number} ({error}); copy it again") from error
    on_bytes(Path(path).stat().st_size)


def _require_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where} holds a JSON {type(value).__name__}, wanted an object; see `eagle-plugin data prepare --help`"
        )
    return value
