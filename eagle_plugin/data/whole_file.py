"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_plugin.data.rows import DataError


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A temporary path to write; the file gets its name when the block ends without an error.

    Raises:
        DataError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror or error}); name another file with --out") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write lines, which carry their newlines; what the iteration raises leaves no file.

    Raises:
        DataError: the file cannot be written.
    """
    with whole_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
