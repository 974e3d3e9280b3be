"""Every sub-command against every accident with its places: `python tests/support/accidents.py` prints the table.

A place is a file or folder that the command reads or writes. It is missing, of the wrong kind, unreadable, empty,
binary, read-only, on a full disk, or Ctrl-C comes when it is opened. The accidents are real: rights are checked by the
system for an ordinary user, to which root changes meanwhile; a disk is full because the size of files is limited to 0
bytes; Ctrl-C is a signal. Nothing needs a mount or a network.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from accident_cases import CASES, Case, make_inputs, stand_ins, sub_commands  # noqa: E402
from token_endpoint import TokenEndpoint  # noqa: E402

from eagle_plugin import cli  # noqa: E402

NOBODY = 65534  # root acts as this user where rights must hold
ENDS = re.compile(r"^error: |^\w+ failed: |^stopped")
BINARY = bytes(range(256)) * 64


class Outcome(NamedTuple):
    """What a command did in one accident."""

    command: str
    place: str
    accident: str
    code: int | None  # None: it ended with a traceback
    output: str  # stdout and stderr together, of child processes too

    @property
    def sentence(self) -> str:
        """The last line that says how the command ended."""
        return ([line.strip() for line in self.output.splitlines() if ENDS.search(line)] or [""])[-1]


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
    "new file": {**WRITTEN, "wrong kind": Accident(_as_folder), "pipe": Accident(_fifo)},
    "new folder": {**WRITTEN, "wrong kind": Accident(_as_file)},
    "cache": {
        "below a file": Accident(_below_a_file),
        "read-only": Accident(_protect, as_ordinary_user),
        "full": Accident(_same, full_disk),
    },
    "stdout": {"full": Accident(_same)},
}


READ_KINDS = ("file", "config", "folder")


def run_all(folder: Path, commands: list[str]) -> Iterator[Outcome]:
    """Run these sub-commands in all their accidents; `folder` must be open to every user."""
    inputs = make_inputs(folder / "inputs")
    for path in (folder / "inputs").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors files are closed to other users
    with TokenEndpoint() as endpoint:
        for command in commands:
            case = CASES[command]
            for place, kind in case.places.items():
                for name, accident in ACCIDENTS[kind].items():
                    own = Path(tempfile.mkdtemp(dir=folder))
                    own.chmod(0o755)
                    yield _run_one(command, case, place, name, accident, own, inputs, endpoint.url)


def _run_one(
    command: str, case: Case, place: str, name: str, accident: Accident, own: Path, inputs: dict[str, Path], url: str
) -> Outcome:
    paths: dict[str, Path] = dict(inputs)
    for other, kind in case.places.items():
        (own / other).mkdir(mode=0o777)
        (own / other).chmod(0o777)
        paths[other] = own / other / ("out.json" if kind == "new file" else "made")
    paths.setdefault("cache", own / "cache")
    path = paths[place]
    if case.places[place] in READ_KINDS:
        copy = shutil.copytree if inputs[place].is_dir() else shutil.copyfile
        path = own / place / inputs[place].name
        copy(inputs[place], path)
    for other, kind in case.places.items():
        if kind in READ_KINDS:
            paths[other] = path if other == place else inputs[other]
    paths[place] = accident.spoil(path)
    args = command.split() + [word.format(**paths, url=url) for word in case.args.split()]
    environment = {"EAGLE_CACHE_DIR": str(paths["cache"]), "PIP_NO_INDEX": "1", "EAGLE_KERNELS": "torch"}
    surroundings = _environment(environment), stand_ins(place, inputs)
    with surroundings[0], surroundings[1], _captured(full=place == "stdout") as output, accident.during(path):
        code = _call(args)
    _unlock(own)
    return Outcome(command, place, name, code, output.getvalue().decode(errors="replace"))


def _call(args: list[str]) -> int | None:
    try:
        return cli.main(args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return None


def _unlock(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o777)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextlib.contextmanager
def _captured(full: bool) -> Iterator[io.BytesIO]:
    """Everything that this process and its children print; with `full`, the standard output is /dev/full."""
    found = io.BytesIO()
    reader, writer = os.pipe()

    def drain() -> None:
        while data := os.read(reader, 1 << 16):
            found.write(data)

    thread = threading.Thread(target=drain)
    thread.start()
    descriptors, streams = [os.dup(1), os.dup(2)], (sys.stdout, sys.stderr)
    out = os.open("/dev/full", os.O_WRONLY) if full else os.dup(writer)
    os.dup2(out, 1)
    os.dup2(writer, 2)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    try:
        yield found
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = streams
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(out)
        os.close(writer)
        thread.join()
        os.close(reader)


def open_folder() -> AbstractContextManager[str]:
    """A temporary folder that every user may enter; pytest's own is closed to others."""
    folder = tempfile.TemporaryDirectory(prefix="accidents-")
    os.chmod(folder.name, 0o755)
    return folder


if __name__ == "__main__":
    with open_folder() as name:
        for outcome in run_all(Path(name), sys.argv[1:] or sub_commands()):
            code = "TRACEBACK" if outcome.code is None else outcome.code
            print(f"{outcome.command:<16} {outcome.place:<9} {outcome.accident:<13} {code:<3} {outcome.sentence}")
            if outcome.code is None:
                print(outcome.output)
