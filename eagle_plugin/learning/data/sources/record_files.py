"""Reads files of JSON objects one by one, with their places: JSON lines, arrays, gzip, zstandard, Parquet."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_plugin.learning.data.rows import LONGEST_LINE, DataError, long_line
from eagle_plugin.learning.data.sources.compressed_files import CHUNK, Counted, decompress, open_raw

PARQUET = b"PAR1"
CUT = "the file is cut off here"
TOO_DEEP = "nested too deeply"
OR_SKIP = "or leave such records out with --skip-broken"


@dataclass(frozen=True)
class LocatedObject:
    """One JSON object and its place in a file."""

    where: str  # `file:line`; in an array, which may be one long line, also the number of the record
    value: dict[str, Any]


@dataclass(frozen=True)
class SkippedRecord:
    """A record that was left out; records are counted by reason."""

    where: str
    reason: str


class BrokenRecord(DataError):
    """One record that cannot be read, in a file whose next record can be found; `reason` is what is counted."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_objects(
    path: str, on_bytes: Callable[[int], None] | None = None, skip_broken: bool = False
) -> Iterator[LocatedObject | SkippedRecord]:
    """Yield the JSON objects of a file in constant memory; the kind of file is detected from its first bytes.

    If a file ends inside its last record, the records before it are read, and a `SkippedRecord` with reason `CUT`
    names the place.

    Args:
        path: a file, or "-" for the standard input.
        on_bytes: called with the number of bytes taken from the file (before decompression), for a progress bar.
        skip_broken: a broken line, or an entry of an array that is no object, is a `SkippedRecord` and not an error.
            JSON that is broken inside an array is always an error: nothing tells where the next record begins.

    Raises:
        DataError: naming file and line, the file is not made of JSON objects, or the package that reads it is missing.
    """
    name = "<stdin>" if path == "-" else path
    with open_raw(path) as raw:
        counted = Counted(raw, name, on_bytes or (lambda count: None))
        file = io.BufferedReader(counted, CHUNK)
        if file.peek(4).startswith(PARQUET):
            yield from _read_parquet(path, name, counted)
            return
        stream = decompress(file, name)
        try:
            first = _first_character(stream)
            read = _read_array if first == b"[" else _read_lines
            yield from read(stream, name, skip_broken)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{name} is a broken gzip file ({error}); copy it again") from error


def _first_character(stream: io.BufferedReader) -> bytes:
    start = stream.peek(64)
    if start.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
        start = stream.peek(64)
    return start.lstrip()[:1]


def _read_lines(stream: io.BufferedReader, name: str, skip_broken: bool) -> Iterator[LocatedObject | SkippedRecord]:
    for number in itertools.count(1):
        where = f"{name}:{number}"
        line = stream.readline(LONGEST_LINE + 1)
        if not line:
            return
        if not line.strip():
            continue
        try:
            value = _parse_line(line, where)
        except BrokenRecord as error:
            at_end = not line.endswith(b"\n") and len(line) <= LONGEST_LINE
            if at_end and number > 1:
                yield SkippedRecord(where, CUT)
            elif skip_broken:
                yield SkippedRecord(where, error.reason)
                while line and not line.endswith(b"\n"):
                    line = stream.readline(CHUNK)
            else:
                raise
        else:
            yield value


def _parse_line(line: bytes, where: str) -> LocatedObject | SkippedRecord:
    if len(line) > LONGEST_LINE:
        raise BrokenRecord(str(long_line(where)), "line that is too long")
    try:
        value = json.loads(line)
    except RecursionError:
        return SkippedRecord(where, TOO_DEEP)
    except ValueError as error:
        message = f"{where} is not JSON ({error}); wanted one JSON object per line, or one JSON array; {OR_SKIP}"
        raise BrokenRecord(message, "line that is not JSON") from error
    return _require_object(value, where)


def _read_array(stream: io.BufferedReader, name: str, skip_broken: bool) -> Iterator[LocatedObject | SkippedRecord]:
    """Decode an array record by record, from a window of text that moves through the file."""
    decode = json.JSONDecoder().raw_decode
    window = _Window(stream, name)
    window.skip_space()
    window.move(1)  # the bracket
    number = 0
    while window.skip_space() != "]":
        if number and window.skip_space() == ",":
            window.move(1)
            window.skip_space()
        elif number and not window.ended:
            raise DataError(f"{name}:{window.line} has no comma after record {number}; repair the array there")
        number += 1
        where = f"{name}:{window.line}, record {number}"
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
                    raise DataError(
                        f"{name}:{line} is not JSON ({error.msg} in record {number}); repair the array there"
                    ) from error
                if len(window.text) - window.at > LONGEST_LINE:
                    raise DataError(
                        f"{where} is longer than {LONGEST_LINE >> 20} Mi characters, wanted an array of prompts; "
                        "split that record"
                    ) from error
                if not window.extend():
                    yield SkippedRecord(where, CUT)
                    return
            except ValueError as error:  # a number of thousands of digits
                raise DataError(f"{where} is not JSON ({error}); repair the array there") from error
            except RecursionError as error:
                raise DataError(f"{where} is nested too deeply to be a prompt; remove that record") from error
        window.move(stop - window.at)
        try:
            yield _require_object(value, where)
        except BrokenRecord as error:
            if not skip_broken:
                raise
            yield SkippedRecord(where, error.reason)
    window.move(1)
    if window.skip_space():
        raise DataError(f"{name}:{window.line} goes on after the array's end; wanted one array, or JSON lines")


def _may_be_cut(error: json.JSONDecodeError, window: _Window) -> bool:
    """Whether the error can be due to text that is not in the window yet: an open string, or an error at its end."""
    at_end = error.pos >= len(window.text) - 16
    return at_end or error.msg.startswith("Unterminated string")


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


def _read_parquet(path: str, name: str, counted: Counted) -> Iterator[LocatedObject]:
    """Rows as objects. The fields that a row does not have, Parquet holds as null at every level: they are dropped."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{name} is a Parquet file; to read it: pip install pyarrow, or write JSON lines") from error
    if path == "-":
        raise DataError("Parquet cannot be read from stdin; give the file's name")
    number, size = 0, Path(path).stat().st_size
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield LocatedObject(f"{name}:row {number}", _without_nulls(row))
            counted.report_until(size * number // file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is a broken Parquet file after row {number} ({error}); copy it again") from error
    counted.report_until(size)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _require_object(value: Any, where: str) -> LocatedObject:
    if not isinstance(value, dict):
        kind = type(value).__name__
        message = f"{where} holds a JSON {kind}, wanted an object; see `eagle-plugin data prepare --help`; {OR_SKIP}"
        raise BrokenRecord(message, f"JSON {kind} in place of an object")
    return LocatedObject(where, value)
