"""Files are written whole or not at all: after an error, on a full disk, and after a kill at any moment."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accident_kinds import full_disk

from eagle_plugin.common.atomic_io import (
    PARTIAL,
    WriteError,
    create_file,
    flush_to_disk,
    remove_leftovers,
    replace_file,
    replace_output,
    write_output,
    write_tensors,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace_with(path: Path, text: str) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(text)


def output_with(path: Path, text: str) -> None:
    with replace_output(path) as temporary:
        temporary.write_text(text)


def lines_with(path: Path, text: str) -> None:
    write_output(path, text.splitlines(keepends=True))


def create_with(path: Path, text: str) -> None:
    create_file(path, text.encode())


Writer = Callable[[Path, str], None]
REPLACING: list[Writer] = [replace_with, output_with, lines_with]
WRITERS: list[Writer] = [*REPLACING, create_with]


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_is_written_below_new_folders_and_nothing_else_is_left(write: Writer, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.txt"
    write(path, "one\nzwei ü\n")
    assert path.read_text(encoding="utf-8") == "one\nzwei ü\n" and names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("write", REPLACING)
def test_a_file_is_replaced_in_one_step(write: Writer, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write(path, "old\n")
    with path.open() as reader:  # a reader that opened the old file reads all of it
        write(path, "new\n")
        assert reader.read() == "old\n"
    assert path.read_text() == "new\n" and names(tmp_path) == ["file.txt"]


def test_the_old_file_is_there_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replace_file(path) as temporary:
        assert temporary.parent == tmp_path and PARTIAL in temporary.name
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_an_existing_file_is_never_written_over_by_create_file(tmp_path: Path) -> None:
    create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(("umask", "wanted"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("write", WRITERS)
def test_permissions_are_those_of_any_new_file(write: Writer, umask: int, wanted: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == wanted


def test_an_error_of_the_caller_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def broken() -> Iterator[str]:
        yield "half\n"
        raise KeyError("the source broke")

    with pytest.raises(KeyError):
        write_output(path, broken())
    with pytest.raises(KeyboardInterrupt), replace_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["file.txt"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from eagle_plugin.common.atomic_io import create_file, replace_file, write_output
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
path, writer = Path({path!r}), {writer!r}
try:
    if writer == "create": create_file(path.with_name("new"), bytes(8000))
    if writer == "output": write_output(path, ["x" * 8000])
    if writer == "replace":
        with replace_file(path) as temporary: temporary.write_bytes(bytes(8000))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("writer", "found"),
    [
        ("replace", "OSError [Errno 27] File too large"),
        ("create", "OSError [Errno 27] File too large"),
        ("output", "WriteError cannot write {path} (File too large); name another file with --out"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(writer: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = FULL_DISK.format(path=str(path), writer=writer)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == found.format(path=path)
    assert path.read_text() == "old" and names(tmp_path) == ["file.txt"]


def test_a_failed_flush_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (replace_with, lambda path, text: create_file(path.with_name("new"), text.encode())):
        with pytest.raises(OSError, match="No space"):
            write(path, "new")
    with pytest.raises(WriteError, match=r"cannot write .*file.txt \(No space left on device\)"):
        write_output(path, ["new"])
    assert path.read_text() == "old" and names(tmp_path) == ["file.txt"]
    with replace_file(path, flush=False) as temporary:  # control: the flush is what failed
        temporary.write_text("new")
    assert path.read_text() == "new"


KILLED = """
import os, signal
from pathlib import Path
from eagle_plugin.common.atomic_io import replace_file
def kill(*arguments): os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == "before the flush": os.fsync = kill
path = Path({path!r})
with replace_file(path) as temporary:
    temporary.write_text("new")
    if {moment!r} == "while writing": kill()
if {moment!r} == "after the rename": kill()
"""


@pytest.mark.parametrize("moment", ["while writing", "before the flush", "after the rename"])
def test_a_killed_writer_leaves_the_old_or_the_new_file(moment: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    code = KILLED.format(moment=moment, path=str(path))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    done = moment == "after the rename"
    assert path.read_text() == ("new" if done else "old")
    left = [name for name in names(tmp_path) if name != "file.txt"]
    assert len(left) == (0 if done else 1) and all(name.startswith(f".file.txt{PARTIAL}") for name in left)
    replace_with(path, "next")  # the temporary file of a killed writer changes nothing
    assert path.read_text() == "next"
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["file.txt"]


def test_only_the_leftovers_of_dead_processes_of_this_machine_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    kept = [f".a{PARTIAL}{host}-{os.getpid()}-7", f".a{PARTIAL}another-{dead.pid}-7", f"a{PARTIAL}{host}-{dead.pid}-7"]
    for name in (*kept, f".a.json{PARTIAL}{host}-{dead.pid}-7"):
        (tmp_path / name).write_text("half")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted(kept)
    remove_leftovers(tmp_path / "missing")


def test_a_folder_that_cannot_be_flushed_is_passed_over_and_a_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")

    def unsupported(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unsupported)
    flush_to_disk(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        flush_to_disk(tmp_path / "file")


def test_where_nothing_can_be_written_the_error_names_the_reason(tmp_path: Path) -> None:
    """The temporary file cannot be removed either; that error must not take the place of the first one."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match=r"cannot write .*/file/a/out.txt \(Not a directory\)"):
        write_output(tmp_path / "file" / "a" / "out.txt", ["new"])
    with pytest.raises(OSError, match="File exists|Not a directory"):
        create_with(tmp_path / "file" / "a" / "new", "new")
    with pytest.raises(WriteError, match=r"\(File name too long\)"):
        write_output(tmp_path / ("n" * 250), ["new"])


def test_a_pipe_is_not_replaced_and_a_link_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match="not a regular file"):
        write_output(tmp_path / "pipe", ["new"])
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", ["new"])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    (tmp_path / "device").symlink_to("/dev/full")
    with pytest.raises(WriteError, match="not a regular file"):
        write_output(tmp_path / "device", ["new"])


def test_tensors_on_a_full_disk_are_an_error_of_the_system(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large") as full:
        write_tensors(tmp_path / "t.safetensors", {"a": torch.zeros(9)})
    assert full.value.errno == errno.EFBIG
    write_tensors(tmp_path / "t.safetensors", {"a": torch.zeros(9)})  # control
