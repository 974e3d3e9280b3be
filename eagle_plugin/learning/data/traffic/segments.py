"""Writes and reads the files of recorded traffic; the oldest files make place for new ones.

`capture-TIME-HOST-PID-NUMBER.jsonl`, where TIME is when the file was begun: the order of names is that of time also
where several servers share a folder. Beside them each writer keeps its counts in `capture-TIME-HOST-PID.counts.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import replace_file
from eagle_plugin.learning.data.rows import DataError, open_lines, read_lines

SEGMENTS = 16  # of which the size limit has room
LARGEST_SEGMENT = 256 << 20  # bytes
PRIVATE = 0o600  # only the owner may read and write
_SEGMENT = re.compile(r"capture-\d{8}T\d{6}-.*-\d+-\d{6}\.jsonl")
COUNTS = ".counts.json"
_READ_BYTES = 1 << 16


def segments_of(folder: Path) -> list[Path]:
    """The segments in a folder, oldest first."""
    return sorted(path for path in folder.glob("capture-*.jsonl") if _SEGMENT.fullmatch(path.name))


def counts_of(folder: Path) -> Counter[str]:
    """What all servers counted that recorded into this folder."""
    total: Counter[str] = Counter()
    for path in folder.glob(f"capture-*{COUNTS}"):
        with contextlib.suppress(OSError, ValueError):
            total.update(json.loads(path.read_text()))
    return total


def recorded_answers(
    folder: Path, ended: Callable[[Path], None] = lambda path: None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of all segments, and the records in them.

    A writer that was killed, or writes just now, leaves a part of a line at the end.

    Args:
        ended: called after every segment.

    Raises:
        DataError: a line is no record.
    """
    for path in segments_of(folder):
        with contextlib.suppress(FileNotFoundError):  # a running server has removed it for new ones
            path.stat()  # `open_lines` has another error for a missing file
            with open_lines(path, "a file of a capture") as file:
                for number, line in read_lines(file, str(path)):
                    if line.endswith(b"\n"):
                        yield line, _record(line, f"{path}:{number}")
        ended(path)


class NewAnswers:
    """The records that are written from now on, each once, in the order of the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = {}  # bytes of the whole lines of each segment that were read

    def skip(self) -> None:
        """Pass over what is there."""
        self._read = {path.name: _whole_lines(path, size) for path, size in _sizes(segments_of(self._folder))}

    def take(self) -> Iterator[dict[str, Any]]:
        """The records since the last call; a line that is being written comes with the next.

        Raises:
            DataError: a line is no record.
        """
        paths = segments_of(self._folder)
        self._read = {path.name: self._read.get(path.name, 0) for path in paths}
        for path in paths:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._read[path.name])
                for _, line in read_lines(file, str(path)):
                    if line.endswith(b"\n"):
                        self._read[path.name] += len(line)
                        yield _record(line, str(path))


def _whole_lines(path: Path, size: int) -> int:
    """Bytes up to the end of the last whole line, of a file of so many bytes."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while size:
            begin = max(0, size - _READ_BYTES)
            file.seek(begin)
            if (end := file.read(size - begin).rfind(b"\n")) >= 0:
                return begin + end + 1
            size = begin
    return 0


def check_folder(name: str | Path) -> Path:
    """The folder of recorded traffic. DataError if it is none."""
    folder = Path(name)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder, wanted the one that EAGLE_CAPTURE names in a server's environment")
    if not segments_of(folder) and not list(folder.glob("capture-*")):
        raise DataError(f"{folder} has no files of a capture, wanted the folder of EAGLE_CAPTURE; give that one")
    return folder


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object, wanted a record of a capture; the file is damaged: remove it")
    return record


class SegmentWriter:
    """Appends records of one process. Not for several threads."""

    def __init__(self, folder: Path, limit: int, clock: Callable[[], float] = time.time) -> None:
        """limit: bytes of all segments in the folder together; clock: seconds since 1970.

        Raises:
            OSError: the folder cannot be made, or nothing can be written there.
            DataError: it is there, and others may write into it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise DataError(f"{folder} is a folder into which others may write; run: chmod 700 {folder}")
        self._folder, self._limit, self._clock, self._latest = folder, limit, clock, 0.0
        self._size_of_one = min(LARGEST_SEGMENT, limit // SEGMENTS)
        self._writer = f"{socket.gethostname()}-{os.getpid()}"
        self._counts = folder / f"capture-{self._moment()}-{self._writer}{COUNTS}"
        self._number = self._size = self.removed = 0
        self._file: int | None = None
        self.write_counts({})

    def holds(self, line: bytes) -> bool:
        """Whether a record is not larger than a segment: others would have to make place for it."""
        return len(line) <= self._size_of_one

    def append(self, line: bytes) -> None:
        """Write one record whole, which `holds`.

        Raises:
            OSError: it cannot be written; what is there of it is removed again.
        """
        if self._file is None or self._size + len(line) > self._size_of_one or not self._is_there(self._file):
            self._open_next()
        assert self._file is not None
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def write_counts(self, counts: Mapping[str, int]) -> None:
        """Replace the counts of this process."""
        with (
            replace_file(self._counts, flush=False) as path,
            open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w") as file,
        ):
            json.dump(dict(counts), file)

    def discard_counts(self) -> None:
        """Remove the counts of this process, which has written nothing."""
        self._counts.unlink(missing_ok=True)

    def close(self) -> None:
        """End the segment."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a file system that has lost it
                os.close(self._file)
            self._file = None

    def _moment(self) -> str:
        self._latest = max(self._latest, self._clock())  # a clock that is set back changes no order
        return time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._latest))

    @staticmethod
    def _is_there(file: int) -> bool:
        """Whether an open segment has a name: another writer may have removed it, on this machine or on another."""
        try:
            return os.fstat(file).st_nlink > 0
        except OSError:  # ESTALE, of a network file system
            return False

    def _open_next(self) -> None:
        self.close()
        self._make_place(self._size_of_one)
        while self._file is None:
            self._number += 1
            path = self._folder / f"capture-{self._moment()}-{self._writer}-{self._number:06}.jsonl"
            with contextlib.suppress(FileExistsError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, PRIVATE)
        self._size = 0

    def _make_place(self, needed: int) -> None:
        """Remove the oldest segments until the next one fits."""
        sizes = dict(_sizes(segments_of(self._folder)))
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total + needed <= self._limit:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                self.removed += 1
            total -= size


def _sizes(paths: list[Path]) -> Iterator[tuple[Path, int]]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # removed by another server's writer
            yield path, path.stat().st_size
