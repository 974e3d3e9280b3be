"""Writes and reads the files of recorded traffic; the oldest files make place for new ones.

`capture-TIME-HOST-PID-NUMBER.jsonl`, so that the order of names is that of time, and several servers can share a
folder. Beside them each writer keeps its counts in `capture-TIME-HOST-PID.counts.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
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
    folder: Path, since: float = 0.0, ended: Callable[[Path], None] = lambda path: None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of all segments, and the records in them.

    A writer that was killed, or writes just now, leaves a part of a line at the end.

    Args:
        since: seconds since 1970; older segments are not read, records are not compared with it.
        ended: called after every segment.

    Raises:
        DataError: a line is no record.
    """
    for path in segments_of(folder):
        with contextlib.suppress(FileNotFoundError):  # a running server has removed it for new ones
            if path.stat().st_mtime >= since:
                with open_lines(path, "a file of a capture") as file:
                    for number, line in read_lines(file, str(path)):
                        if line.endswith(b"\n"):
                            yield line, _record(line, f"{path}:{number}")
        ended(path)


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

    def __init__(self, folder: Path, limit: int) -> None:
        """limit: bytes of all segments in the folder together.

        Raises:
            OSError: the folder cannot be made, or nothing can be written there.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._limit = folder, limit
        self._size_of_one = min(LARGEST_SEGMENT, limit // SEGMENTS)
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._name = f"capture-{began}-{socket.gethostname()}-{os.getpid()}"
        self._number = self._size = self.removed = 0
        self._file: int | None = None
        self.write_counts({})

    def append(self, line: bytes) -> None:
        """Write one record whole.

        Raises:
            OSError: it cannot be written; what is there of it is removed again.
        """
        if self._file is None or self._size + len(line) > self._size_of_one or not os.fstat(self._file).st_nlink:
            self._open_next(len(line))
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
            replace_file(self._folder / f"{self._name}{COUNTS}", flush=False) as path,
            open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w") as file,
        ):
            json.dump(dict(counts), file)

    def discard_counts(self) -> None:
        """Remove the counts of this process, which has written nothing."""
        (self._folder / f"{self._name}{COUNTS}").unlink(missing_ok=True)

    def close(self) -> None:
        """End the segment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_next(self, needed: int) -> None:
        self.close()
        self._make_place(max(needed, self._size_of_one))
        while self._file is None:
            self._number += 1
            path = self._folder / f"{self._name}-{self._number:06}.jsonl"
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
