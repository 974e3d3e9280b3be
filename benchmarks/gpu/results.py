"""The files of `make gpu` in its folder: NAME.json of every step, complete or not, and one archive of all of them."""

from __future__ import annotations

import datetime
import json
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import Step
from eagle_plugin.common.atomic_io import replace_output, write_output
from eagle_plugin.common.errors import json_fault

EARLIER = "earlier"  # the folder of results that newer ones replaced
RUNNING = "the step was still running"


class Results:
    """Writes the result of one step, as often as more of it is known.

    What the file held before is moved to the folder `earlier` at the first call: rows of another device, of other
    sources or of a step that was not finished are never lost.
    """

    def __init__(self, out: Path, step: Step, identity: dict[str, str]) -> None:
        self.file = out / f"{step.name}.json"
        self._about = {"step": step.name, "what": step.what, "identity": identity}
        self._began, self._first = time.perf_counter(), True

    def keep(self, result: dict[str, Any]) -> None:
        """Write what is known so far, marked as unfinished."""
        self._write(result, {"unfinished": RUNNING})

    def finish(self, result: dict[str, Any]) -> None:
        """Write the whole result."""
        self._write(result, {})

    def _write(self, result: dict[str, Any], mark: dict[str, str]) -> None:
        if self._first and self.file.exists():
            set_aside(self.file)
        self._first = False
        seconds = round(time.perf_counter() - self._began, 1)
        about = self._about | mark | {"date": datetime.date.today().isoformat(), "seconds": seconds}
        write_output(self.file, [json.dumps(about | {"result": result}, indent=1) + "\n"])


def set_aside(file: Path) -> None:
    """Move a result to the folder of earlier ones, under a number that is free."""
    folder = file.parent / EARLIER
    folder.mkdir(exist_ok=True)
    number = 1
    while (place := folder / f"{file.stem}-{number}.json").exists():
        number += 1
    file.replace(place)


def finished(file: Path, identity: dict[str, str]) -> bool:
    """Whether the file is the whole result of a step with this identity; a whole form counts for a short one."""
    document = read(file)
    if document is None or "unfinished" in document:
        return False
    found = document["identity"]
    whole = identity | {"size": "full"} if identity.get("size") == "short" else identity
    return found in (identity, whole)


def mark(file: Path, identity: dict[str, str], reason: str) -> int:
    """Write into an unfinished result why it is so; returns the number of its rows, 0 without such a result."""
    document = read(file)
    if document is None or document["identity"] != identity or document.get("unfinished") != RUNNING:
        return 0
    write_output(file, [json.dumps(document | {"unfinished": reason}, indent=1) + "\n"])
    return len(document["result"].get("rows", ()))


def read(file: Path) -> dict[str, Any] | None:
    """The document; None for a file that is not there, or, with a sentence on stderr, for a damaged one."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        document["identity"].items()
        return dict(document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = json_fault(error) if isinstance(error, ValueError | RecursionError) else "is not a result of a step"
        print(f"{file} {reason}: the step runs again", file=sys.stderr)
        return None


def pack(out: Path, archive: Path, more: Sequence[Path] = ()) -> None:
    """Write all results and logs into one file, for a machine from which few files come back.

    more: further folders, which go below `cache` by their names; they need not exist.
    """
    with replace_output(archive) as temporary, tarfile.open(temporary, "w:gz") as packed:
        for folder, place in ((out, Path()), *((one, Path("cache", one.name)) for one in more)):
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.resolve() != archive.resolve() and ".partial-" not in file.name:
                    with suppress(FileNotFoundError):  # a program has just replaced it
                        packed.add(file, place / file.relative_to(folder))
