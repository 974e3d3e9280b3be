"""Files that are written whole or not at all, and flushed so that they survive a power cut.

Every function writes a temporary file beside the final path (`.NAME.partial-HOST-PID-THREAD`) and gives it the final
name in one step. Readers see the old file or the complete new one. An error removes the temporary file. After a kill it
is left, under a name that contains `PARTIAL`, until `remove_leftovers`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_plugin.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial-"
ANOTHER_FILE = "name another file with --out"


class WriteError(UserError):
    """An output file of a command that cannot be written."""


@contextmanager
def replace_file(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an error, the file written there replaces `path`.

    Missing parent folders are created. The file keeps the permissions that it was created with.

    Args:
        flush: flush the contents to the disk before the rename: without it, a power cut can leave an empty file.

    Raises:
        OSError: the file cannot be written; `path` is as it was before.
    """
    temporary = _temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if flush:
            flush_to_disk(temporary)
        temporary.replace(path)
    finally:
        _remove(temporary)


@contextmanager
def replace_output(path: Path, fix: str = ANOTHER_FILE) -> Iterator[Path]:
    """`replace_file` for a file that the user named; `fix` is what the error advises.

    Of a symbolic link, the file that it names is replaced, and the link stays.

    Raises:
        WriteError: the file cannot be written; `path` is as it was before.
    """
    try:
        final = Path(os.path.realpath(path)) if path.is_symlink() else path
        _check_regular(final)
        with replace_file(final) as temporary:
            yield temporary
    except OSError as error:
        raise WriteError(f"cannot write {path} ({error.strerror or error}); {fix}") from error


@contextmanager
def inherit_privacy(*inputs: str | Path) -> Iterator[None]:
    """While the block runs, what this process writes is readable by its user only, if one of the input files is.

    Captured traffic has mode 0600; what is made from it has the same texts.
    """
    before = os.umask(0o077) if any(map(_is_private, inputs)) else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def _is_private(path: str | Path) -> bool:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # standard input, or a file whose reader has a better sentence
        return False
    return stat.S_ISREG(mode) and not mode & 0o077


def write_output(path: Path, lines: Iterable[str], fix: str = ANOTHER_FILE, mode: int | None = None) -> None:
    """Write lines, which include their newlines, as UTF-8; an error that the iteration raises leaves `path` as it was.

    mode: of the file; None: as for any new one.

    Raises:
        WriteError: the file cannot be written.
    """
    with replace_output(path, fix) as temporary, temporary.open("w", encoding="utf-8") as file:
        if mode is not None:
            temporary.chmod(mode)
        file.writelines(lines)


def remove_leftovers(folder: Path) -> None:
    """Remove from a folder the temporary files of processes of this machine that were killed."""
    ours = re.compile(rf"\..+{re.escape(PARTIAL + socket.gethostname())}-(\d+)-\d+")
    try:
        names = os.listdir(folder)
    except OSError:
        return  # a folder that is not there yet has none
    for name in names:
        found = ours.fullmatch(name)
        if found and not _is_alive(int(found[1])):
            _remove(folder / name)


def create_file(path: Path, *parts: bytes | bytearray | memoryview) -> None:
    """Write a file that must not exist yet, of these parts, and flush it and its folder to the disk.

    Raises:
        FileExistsError: `path` exists; it is not changed.
        OSError: the file cannot be written.
    """
    temporary = _temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        _name_new_file(temporary, path)
    finally:
        _remove(temporary)
    flush_to_disk(path.parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written. The library's own error has the number of the system's error only in its text.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def flush_to_disk(path: Path) -> None:
    """Flush a file or folder to the disk (fsync); some network file systems cannot flush folders, which is ignored."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def _remove(temporary: Path) -> None:
    # Where nothing can be written, nothing can be removed either; this error would hide the one that the user must see.
    with contextlib.suppress(OSError):
        temporary.unlink()


def _check_regular(path: Path) -> None:
    """Raise OSError for a device, pipe or socket: a rename would put a file in its place."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a folder is refused by the rename
            raise OSError(errno.EINVAL, "not a regular file", str(path))


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL}{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")


def _name_new_file(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)  # unlike a rename, it fails if the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if final.exists():
            raise FileExistsError(final) from None
        os.rename(temporary, final)
