"""A folder belongs to one running job: an flock on a file in it, which the system frees when the process ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from eagle_plugin.learning.jobs.recipe import JobError

LOCK = ".job.lock"


@contextmanager
def hold(folders: dict[str, Path]) -> Iterator[None]:
    """Make the folders and hold them within this block.

    folders: what names each one, such as "--data" -> its path; where two are the same folder, the last one names it.

    Raises:
        JobError: a folder cannot be written, or another job holds it.
    """
    with ExitStack() as stack:
        for folder, name in {path.resolve(): name for name, path in folders.items()}.items():
            lock = FileLock(folder / LOCK, timeout=0)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except Timeout as error:
                raise JobError(
                    f"{folder} is in use by another running job; wait for it, stop it, or name another folder with "
                    f"{name}"
                ) from error
            except OSError as error:
                what = f"cannot make the folder {folder} ({error.strerror})"
                raise JobError(f"{what}; name another one with {name}") from error
            stack.callback(lock.release)
        yield
