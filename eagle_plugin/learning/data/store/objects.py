"""Objects below one URL: a local folder, S3, Google Cloud Storage, Azure, or any other file system of fsspec.

An object is written whole or not at all. `create` never replaces another one; `replace` does, for small records.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from eagle_plugin.common.atomic_io import PARTIAL, create_file, replace_file
from eagle_plugin.common.errors import first_line
from eagle_plugin.common.installed import install_command
from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.learning.data.rows import DataError

# obstore reads the settings of these from the environment: AWS_ENDPOINT, AWS_REGION, GOOGLE_SERVICE_ACCOUNT, AZURE_...
OBJECT_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ObjectExists(DataError):
    """There is already an object of that name."""


class Folder(Protocol):
    """The objects below one URL. Every method may be called from several threads."""

    url: str

    def names(self) -> list[str]:
        """The names of all objects directly below the URL, sorted; empty before the first write."""

    def sizes(self) -> dict[str, int | None]:
        """Name -> bytes of the same objects; None where the file system does not tell."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes | bytearray:
        """Bytes [start, stop) of an object, in one request; fewer if the object ends earlier.

        Raises:
            FileNotFoundError: there is no such object.
        """

    def create(self, name: str, *parts: bytes | bytearray | memoryview) -> None:
        """Write a new object whole, of these parts.

        Raises:
            ObjectExists: the name is taken; the existing object is not changed.
            DataError: the disk is full; nothing is left of the object.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Write an object whole; readers see the old one or the new one."""

    def remove(self, name: str) -> None:
        """Remove an object."""


def open_folder(url: str | Path) -> Folder:
    """The folder of a path or URL; nothing is created before the first write.

    Raises:
        DataError: the scheme is unknown, its library is not installed, or nothing follows the scheme.
    """
    text = str(url)
    scheme, separator, place = text.partition("://")
    if not separator:
        return LocalFolder(Path(text).expanduser())
    scheme = scheme.lower()
    if scheme == "file":
        return LocalFolder(Path(unquote(urlsplit(text).path)))
    if not place.strip("/"):
        raise DataError(f"{text} names no place; write for example s3://bucket/folder")
    return ObjectStoreFolder(text) if scheme in OBJECT_STORES else FsspecFolder(text)


class LocalFolder:
    """A folder of the local file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def names(self) -> list[str]:
        return list(self.sizes())

    def sizes(self) -> dict[str, int | None]:
        if not self.path.is_dir():
            if self.path.exists():
                raise DataError(f"{self.path} is a file, wanted a folder; give another path")
            return {}
        with _reading(self.path):
            entries = sorted(os.scandir(self.path), key=lambda entry: entry.name)
            sizes = {entry.name: _size(entry) for entry in entries if _is_object(entry)}
        return {name: size for name, size in sizes.items() if size is not None}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        with _reading(self.path / name), (self.path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = bytearray(max(0, (size if stop is None else min(stop, size)) - start))
            file.seek(start)
            del data[file.readinto(data) :]  # the file became shorter while it was read
            return data

    def create(self, name: str, *parts: bytes | bytearray | memoryview) -> None:
        final = self.path / name
        try:
            create_file(final, *parts)
        except FileExistsError as error:
            raise ObjectExists(f"{final} exists already; it was not changed") from error
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise DataError(f"cannot write {final} ({error.strerror}); make {self.path} writable") from error
            size = f"{sum(map(len, parts)) / 2**20:.1f} MiB"
            raise DataError(
                f"the disk of {self.path} is full: {name} needs {size}; free some space and run again, "
                "what was finished before is kept"
            ) from error

    def replace(self, name: str, data: bytes) -> None:
        try:
            with replace_file(self.path / name) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            what = f"cannot write {self.path / name} ({error.strerror})"
            raise DataError(f"{what}; free space or make {self.path} writable") from error

    def remove(self, name: str) -> None:
        try:
            (self.path / name).unlink()
        except OSError as error:
            what = f"cannot remove {self.path / name} ({error.strerror})"
            raise DataError(f"{what}; make {self.path} writable") from error

    def remove_partial(self, prefix: str) -> None:
        """Remove the temporary files of a killed writer of names with this prefix; that writer must not be running."""
        for path in self.path.glob(f".{prefix}*{PARTIAL}*"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); check its rights and its disk") from error


def _size(entry: os.DirEntry[str]) -> int | None:
    """None: another process has just removed it."""
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return None


def _is_object(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() and PARTIAL not in entry.name


class _RemoteFolder(ABC):
    """What all folders have in common that are not on a local disk."""

    missing: tuple[type[Exception], ...] = (FileNotFoundError,)
    taken: tuple[type[Exception], ...] = (FileExistsError,)
    place = "URL"  # what the user checks first

    def __init__(self, url: str) -> None:
        self.url = without_credentials(url.rstrip("/"))

    @abstractmethod
    def sizes(self) -> dict[str, int | None]: ...

    def names(self) -> list[str]:
        return list(self.sizes())

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str = "") -> Iterator[None]:
        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except DataError:
            raise
        # Each file system raises errors of its own: ftplib's and those of HTTP clients have no common base.
        except Exception as error:
            if isinstance(error, self.taken):
                raise ObjectExists(f"{where} exists already; it was not changed") from error
            if verb == "read" and isinstance(error, self.missing):
                raise FileNotFoundError(where) from error
            found = f"cannot {verb} {where} ({first_line(error)})"
            raise DataError(f"{found}; check the {self.place}, the access rights and the network") from error


def _joined(parts: tuple[bytes | bytearray | memoryview, ...]) -> bytes:
    return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


@contextlib.contextmanager
def _opening(url: str, hint: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(f"{url} needs the Python package {error.name}: {install_command('data')}") from error
    except Exception as error:
        raise DataError(f"{url} cannot be opened ({first_line(error)}); {hint}") from error


class ObjectStoreFolder(_RemoteFolder):
    """A prefix of S3, Google Cloud Storage or Azure, through obstore.

    Not through its file system for fsspec, which cannot refuse to replace an object.
    """

    place = "bucket"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        with _opening(url, "correct the URL or the environment (AWS_ENDPOINT, ...)"):
            from obstore.exceptions import AlreadyExistsError, NotFoundError
            from obstore.store import from_url

            self.missing, self.taken = (NotFoundError, FileNotFoundError), (AlreadyExistsError,)
            self._store: Any = from_url(url.rstrip("/"))

    def sizes(self) -> dict[str, int | None]:
        with self._errors("list"):
            listing = self._store.list_with_delimiter()
            return dict(sorted((item["path"].rsplit("/", 1)[-1], item["size"]) for item in listing["objects"]))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._errors("read", name):
            if stop is not None:
                return bytes(self._store.get_range(name, start=start, end=stop))
            options = {"range": {"offset": start}} if start else None
            return bytes(self._store.get(name, options=options).bytes())

    def create(self, name: str, *parts: bytes | bytearray | memoryview) -> None:
        with self._errors("write", name):
            # In one request: a multipart upload cannot be refused if the object exists.
            self._store.put(name, _joined(parts), mode="create", use_multipart=False)

    def replace(self, name: str, data: bytes) -> None:
        with self._errors("write", name):
            self._store.put(name, data, use_multipart=False)

    def remove(self, name: str) -> None:
        with self._errors("remove", name):
            self._store.delete(name)


class FsspecFolder(_RemoteFolder):
    """A folder of any other file system of fsspec, such as memory://."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        with _opening(url, "use a path, s3:// or gs://, or install its library"):
            import fsspec

            self._files, self._path = fsspec.url_to_fs(url.rstrip("/"))

    def sizes(self) -> dict[str, int | None]:
        with self._errors("list"):
            self._files.invalidate_cache()
            if not self._files.exists(self._path):
                return {}
            found = (info for info in self._files.ls(self._path) if info["type"] == "file")
            return dict(sorted((info["name"].rsplit("/", 1)[-1], info.get("size")) for info in found))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._errors("read", name):
            return self._files.cat_file(f"{self._path}/{name}", start=start, end=stop)

    def create(self, name: str, *parts: bytes | bytearray | memoryview) -> None:
        path = f"{self._path}/{name}"
        with self._errors("write", name):
            if self._files.exists(path):
                raise ObjectExists(f"{self.url}/{name} exists already; it was not changed")
            self._write(path, _joined(parts))

    def replace(self, name: str, data: bytes) -> None:
        with self._errors("write", name):
            self._write(f"{self._path}/{name}", data)

    def _write(self, path: str, data: bytes) -> None:
        self._files.makedirs(self._path, exist_ok=True)
        partial = f"{path}{PARTIAL}{socket.gethostname()}-{os.getpid()}"
        self._files.pipe_file(partial, data)
        self._files.mv(partial, path)

    def remove(self, name: str) -> None:
        with self._errors("remove", name):
            self._files.rm_file(f"{self._path}/{name}")
