"""What can happen to a place that a command reads or writes: how it is spoilt, and what holds during the call."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

NOBODY = 65534  # root acts as this user where rights must hold
BINARY = bytes(range(256)) * 64


class Accident(NamedTuple):
    """How a place is spoilt: returns the path to give to the command; `during` is entered around the call."""

    spoil: Callable[[Path], Path]
    during: Callable[[Path], AbstractContextManager[None]] = lambda path: contextlib.nullcontext()


# --- accidents of what is read: spoil(path) gets a copy that is the command's own


def _remove(path: Path) -> Path:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


def _swap_kind(path: Path) -> Path:
    """A folder in place of a file, and the other way round."""
    was_folder = path.is_dir()
    _remove(path)
    path.write_text("x\n") if was_folder else path.mkdir()
    return path


def _forbid(path: Path) -> Path:
    """No file can be opened; folders can be listed."""
    for file in _files(path):
        file.chmod(0)
    return path


def _lock(path: Path) -> Path:
    """Not even its existence can be seen."""
    path.parent.chmod(0)
    return path


def _empty(path: Path) -> Path:
    for file in _files(path):
        file.write_bytes(b"")
    return path


def _clear(path: Path) -> Path:
    _remove(path).mkdir()
    return path


def _scramble(path: Path) -> Path:
    for file in _files(path):
        file.write_bytes(BINARY)
    return path


def _scramble_parts(path: Path) -> Path:
    """Of a folder, every file except config.json, which is read first."""
    for file in _files(path):
        if file.name not in ("config.json", "manifest.json"):
            file.write_bytes(BINARY)
    return path


def _nest(path: Path) -> Path:
    for file in _files(path):
        file.write_text("[" * 5000 + "]" * 5000 + "\n")
    return path


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


# --- accidents of a head's folder: what its files say is nonsense


def _say(**keys: Any) -> Callable[[Path], Path]:
    """Change keys of config.json."""

    def spoil(path: Path) -> Path:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))
        return path

    return spoil


def _mark_order(path: Path) -> Path:
    file = path / "config.json"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    return path


def _link_to_itself(path: Path) -> Path:
    file = path / "config.json"
    file.unlink()
    file.symlink_to(file.name)
    return path


def _pipe_of_weights(path: Path) -> Path:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    return path


def _two_values(path: Path) -> Path:
    """One tensor in two shards."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(path / "model.safetensors")
    save_file({"norm.weight": 2 * weights["norm.weight"]}, path / "model-2.safetensors")
    return path


def _no_quantity(path: Path) -> Path:
    """Null where the rotary positions need a number, under both names."""
    return _say(rope_theta=None, rope_parameters=None)(path)


NONSENSE = {
    "dtype": Accident(_say(dtype="banana")),
    "rope null": Accident(_no_quantity),
    "rope type": Accident(_say(rope_scaling={"rope_type": "corkscrew", "factor": 2.0})),
    "rope factor": Accident(_say(rope_scaling={"rope_type": "linear", "factor": "two"})),
    "rope options": Accident(_say(rope_scaling={"rope_type": "llama3"})),
    "eps": Accident(_say(rms_norm_eps="small")),
    "layers": Accident(_say(num_hidden_layers=10**9)),
    "BOM": Accident(_mark_order),
    "link loop": Accident(_link_to_itself),
    "pipe": Accident(_pipe_of_weights),
    "two values": Accident(_two_values),
}


# --- accidents of what is written


def _below_a_file(path: Path) -> Path:
    path.parent.joinpath("file").write_text("x\n")
    return path.parent / "file" / path.name


def _protect(path: Path) -> Path:
    path.parent.chmod(0o555)
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _as_folder(path: Path) -> Path:
    (path / "folder").mkdir(parents=True)
    return path


def _as_file(path: Path) -> Path:
    path.write_text("x\n")
    return path


@contextlib.contextmanager
def as_ordinary_user(path: Path | None = None) -> Iterator[None]:
    """Act as a user to whom the rights of files apply; root becomes root again afterwards."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def full_disk(path: Path | None = None) -> Iterator[None]:
    """No file can grow: every write to a file fails; pipes still work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


_trap: dict[str, str] = {}  # "folder": Ctrl-C comes when something in it is opened or made


def _spring(event: str, arguments: tuple[Any, ...]) -> None:
    if _trap and event in ("open", "os.mkdir", "os.scandir", "os.listdir"):
        path = arguments[0]
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_trap["folder"]):
            _trap.clear()
            os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def ctrl_c(path: Path) -> Iterator[None]:
    """SIGINT at the moment in which the command opens the place, or something in it."""
    if not _hooked:
        sys.addaudithook(_spring)
        _hooked.append(True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    _trap["folder"] = str(path.parent)
    try:
        yield
    finally:
        _trap.clear()
        signal.signal(signal.SIGINT, before)


_hooked: list[bool] = []


def _same(path: Path) -> Path:
    return path


READ = {
    "missing": Accident(_remove),
    "wrong kind": Accident(_swap_kind),
    "unreadable": Accident(_forbid, as_ordinary_user),
    "locked away": Accident(_lock, as_ordinary_user),
    "empty": Accident(_empty),
    "binary": Accident(_scramble),
    "5,000 levels": Accident(_nest),
    "interrupted": Accident(_same, ctrl_c),
}
WRITTEN = {
    "below a file": Accident(_below_a_file),
    "read-only": Accident(_protect, as_ordinary_user),
    "full": Accident(_same, full_disk),
    "interrupted": Accident(_same, ctrl_c),
}
ACCIDENTS: dict[str, dict[str, Accident]] = {
    "file": READ,
    "config": {**READ, "nothing in it": Accident(_clear)},
    "folder": {**READ, "nothing in it": Accident(_clear), "binary parts": Accident(_scramble_parts)},
    "head": {**READ, "nothing in it": Accident(_clear), "binary parts": Accident(_scramble_parts), **NONSENSE},
    "new file": {**WRITTEN, "wrong kind": Accident(_as_folder), "pipe": Accident(_fifo)},
    "new folder": {**WRITTEN, "wrong kind": Accident(_as_file)},
    "cache": {
        "below a file": Accident(_below_a_file),
        "read-only": Accident(_protect, as_ordinary_user),
        "full": Accident(_same, full_disk),
    },
    "stdout": {"full": Accident(_same)},
}
