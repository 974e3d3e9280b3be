"""The sizes and sha256 of the files of a folder, in a file beside them: `digests.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

DIGESTS = "digests.json"
READ_BYTES = 4 << 20


class _Wanted(NamedTuple):
    size: int
    sha256: str


def hash_file(path: Path, report: Callable[[float], None] | None = None) -> str:
    """sha256 of a file; `report` gets the number of bytes after every block.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            if report is not None:
                report(len(block))
    return digest.hexdigest()


def write_digests(folder: Path, names: Iterable[str]) -> None:
    """Record the files of a folder in its digests.json, which is written in place: the folder must be new.

    Raises:
        OSError: a file cannot be read, or digests.json cannot be written.
    """
    record = {name: {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name)} for name in names}
    (folder / DIGESTS).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def recorded_bytes(folder: Path) -> int:
    """The sum of the sizes in digests.json; 0 if it cannot be read."""
    try:
        return sum(wanted.size for wanted in _read(folder).values())
    except (OSError, ValueError):
        return 0


def find_damage(folder: Path, report: Callable[[float], None] | None = None) -> list[str]:
    """What is wrong with the files that digests.json names, "NAME has ..." each; they are read in full.

    report: gets the number of bytes after every block.
    """
    try:
        record = _read(folder)
    except (OSError, ValueError) as error:
        return [f"{DIGESTS} cannot be read ({error})"]
    found = (_compare(folder / name, wanted, report) for name, wanted in record.items())
    return [problem for problem in found if problem]


def _read(folder: Path) -> dict[str, _Wanted]:
    try:
        record = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        return {name: _Wanted(int(wanted["bytes"]), str(wanted["sha256"])) for name, wanted in record.items()}
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it does not list files with bytes and sha256: {error}") from error


def _compare(path: Path, wanted: _Wanted, report: Callable[[float], None] | None) -> str | None:
    try:
        found = path.stat().st_size
        if found != wanted.size:
            return f"{path.name} has {found:,} bytes, wanted {wanted.size:,}"
        if hash_file(path, report) != wanted.sha256:
            return f"{path.name} does not have its sha256"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None
