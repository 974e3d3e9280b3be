"""Every sub-command against every accident with its places: `python tests/support/accidents.py` prints the table.

The scenes of `accident_scenes.py` follow it.

A place is a file or folder that the command reads or writes. It is missing, of the wrong kind, unreadable, empty,
binary, read-only, on a full disk, or Ctrl-C comes when it is opened. The accidents are real: rights are checked by the
system for an ordinary user, to which root changes meanwhile; a disk is full because the size of files is limited to 0
bytes; Ctrl-C is a signal. Nothing needs a mount or a network.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from accident_cases import CASES, Case, make_inputs, stand_ins, sub_commands  # noqa: E402
from accident_kinds import ACCIDENTS, Accident  # noqa: E402
from accident_scenes import SCENES  # noqa: E402
from token_endpoint import TokenEndpoint  # noqa: E402

from eagle_plugin import cli  # noqa: E402
from eagle_plugin.common.atomic_io import PARTIAL  # noqa: E402
from eagle_plugin.kernels import loader  # noqa: E402

ENDS = re.compile(r"^error: |^[\w-]+ failed: |^stopped")


class Outcome(NamedTuple):
    """What a command did in one accident."""

    command: str
    place: str
    accident: str
    code: int | None  # None: it ended with a traceback
    output: str  # stdout and stderr together, of child processes too
    left: list[str]  # temporary files that were not removed
    seconds: float = 0.0

    @property
    def sentences(self) -> list[str]:
        """The lines that say how the command ended."""
        return [line.strip() for line in self.output.splitlines() if ENDS.search(line)]


READ_KINDS = ("file", "config", "folder", "head")


@contextlib.contextmanager
def open_workshop() -> Iterator[Workshop]:
    """A temporary folder with good inputs that every user may enter, and a server that answers prompts."""
    with tempfile.TemporaryDirectory(prefix="accidents-") as name, TokenEndpoint() as endpoint:
        folder = Path(name)
        inputs = make_inputs(folder / "inputs")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors files are closed to other users
        try:
            yield Workshop(folder, inputs, endpoint.url)
        finally:  # the commands ran on the torch path (see `_run`); what comes after them in this process does not
            loader.open_library.cache_clear()
            loader.function.cache_clear()


class Workshop(NamedTuple):
    """Where accidents are made."""

    folder: Path
    inputs: dict[str, Path]
    url: str

    def run(self, command: str, *, by_turns: bool = False) -> Iterator[Outcome]:
        """Run a sub-command in all its accidents, or, where places take turns with them, in every second one."""
        for first, (place, kind) in enumerate(CASES[command].places.items()):
            for number, (name, accident) in enumerate(ACCIDENTS[kind].items(), first):
                if not by_turns or number % 2 == 0 or len(ACCIDENTS[kind]) == 1:
                    yield self.run_one(command, place, name, accident)

    def run_one(self, command: str, place: str, name: str, accident: Accident) -> Outcome:
        """Run a sub-command in one accident."""
        return self._run(command, CASES[command], place, name, accident)

    def run_undisturbed(self, command: str, option: str = "") -> Outcome:
        """Run a sub-command with good inputs."""
        case = CASES[command]
        return self._run(command, case._replace(args=f"{case.args} {option}"), "", "none", Accident(lambda path: path))

    def run_scene(self, name: str) -> Outcome:
        """Run the command of a scene."""
        scene, own = SCENES[name], Path(tempfile.mkdtemp(dir=self.folder))
        places = {name: str(path) for name, path in self.inputs.items()}
        places |= {"own": str(own), "out": str(own / "out"), "url": self.url}
        surroundings = _environment({"EAGLE_CACHE_DIR": str(own / "none"), "EAGLE_KERNELS": "torch"})
        began = time.monotonic()
        with surroundings, stand_ins("", self.inputs), scene.around(places), _captured(full=False) as output:
            code = _call([word.format(**places) for word in scene.args.split()])
        text = output.getvalue().decode(errors="replace")
        left = [path.name for path in own.rglob("*") if PARTIAL in path.name]
        return Outcome(scene.args.split(" {")[0], "", name, code, text, left, time.monotonic() - began)

    def _run(self, command: str, case: Case, place: str, name: str, accident: Accident) -> Outcome:
        own = Path(tempfile.mkdtemp(dir=self.folder))
        own.chmod(0o755)
        return _run(command, case, place, name, accident, own, self.inputs, self.url)


def _run(
    command: str, case: Case, place: str, name: str, accident: Accident, own: Path, inputs: dict[str, Path], url: str
) -> Outcome:
    paths: dict[str, Path] = {"cache": own / "none", **inputs}
    for other, kind in case.places.items():
        (own / other).mkdir()
        (own / other).chmod(0o777)
        if kind not in READ_KINDS:
            paths[other] = own / other / ("out.json" if kind == "new file" else "made")
    path = paths.get(place, own)  # before it is spoilt
    if place in case.places:
        if case.places[place] in READ_KINDS:
            path = own / place / inputs[place].name
            copy = shutil.copytree if inputs[place].is_dir() else shutil.copyfile
            copy(inputs[place], path)
        paths[place] = accident.spoil(path)
    args = command.split() + [word.format(**paths, url=url) for word in case.args.split()]
    environment = {"EAGLE_CACHE_DIR": str(paths["cache"]), "PIP_NO_INDEX": "1", "EAGLE_KERNELS": "torch"}
    surroundings = _environment(environment), stand_ins(place, inputs)
    with surroundings[0], surroundings[1], _captured(full=place == "stdout") as output, accident.during(path):
        code = _call(args)
    _unlock(own)
    left = [path.name for path in own.rglob("*") if PARTIAL in path.name or path.name.startswith(".made.")]
    return Outcome(command, place, name, code, output.getvalue().decode(errors="replace"), left)


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


if __name__ == "__main__":
    with open_workshop() as workshop:
        cases = (outcome for chosen in sys.argv[1:] or sub_commands() for outcome in workshop.run(chosen))
        scenes = () if sys.argv[1:] else map(workshop.run_scene, SCENES)
        for outcome in itertools.chain(cases, scenes):
            code = "TRACEBACK" if outcome.code is None else outcome.code
            printed = (outcome.sentences or [""])[-1].replace(str(workshop.folder), "...")
            print(f"{outcome.command:<16} {outcome.place:<9} {outcome.accident:<13} {code:<3} {printed}", flush=True)
            if outcome.code is None:
                print(outcome.output)
