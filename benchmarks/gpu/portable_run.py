"""Unpack what benchmarks/gpu/portable.py made, on a machine without a network, and run `make gpu` there:

    python3 run.py FOLDER                                  # unpack what is beside this file
    python3 run.py FOLDER --minutes 9 --pack results.tar.gz   # and run; all options of benchmarks/gpu/run.py

Parts may come in several calls, each with its own copy of this file. A part that is there already is not unpacked
again. Steps that are named by --steps run as soon as their own parts are there; without it all parts are needed.
Nothing but Python's own library is needed to unpack.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MANIFEST = "manifest.json"
PARTS = "parts"  # below FOLDER: pieces that wait for others, and a list of the files of every part that is unpacked


def main(arguments: list[str]) -> int:
    """Unpack, and run if there is more than a folder."""
    if not arguments or arguments[0].startswith("-"):
        print("error: no folder was given, wanted: python3 run.py FOLDER [options of make gpu]", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    parts = json.loads((HERE / MANIFEST).read_text())["parts"]
    collect(folder)
    complete = [part for part in parts if len(pieces_of(folder, part)) == part["pieces"]]
    with concurrent.futures.ProcessPoolExecutor() as pool:
        list(pool.map(unpack, [folder] * len(complete), complete))
    missing = [part for part in parts if not listing(folder, part).exists()]
    print(f"{folder}: {len(complete)} parts unpacked, {len(parts) - len(complete) - len(missing)} were there already")
    if missing:
        print(f"not there yet: {', '.join(part['name'] for part in missing)}", file=sys.stderr)
    if len(arguments) == 1:
        return 0
    steps = steps_in(arguments)
    if needed := [part["name"] for part in missing if not (steps and part["steps"]) or steps & set(part["steps"])]:
        print(f"error: {len(needed)} of {len(parts)} parts are missing; carry the other folders first", file=sys.stderr)
        return 2
    return run(folder, arguments[1:])


def steps_in(options: list[str]) -> set[str]:
    """The names after --steps; empty for all steps."""
    if "--steps" not in options:
        return set()
    names = options[options.index("--steps") + 1 :]
    end = next((place for place, name in enumerate(names) if name.startswith("-")), len(names))
    return set(names[:end])


def collect(folder: Path) -> None:
    """Put the pieces beside this file to those that wait."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    for piece in sorted(HERE.glob("*.tar*.*of*")):
        if not (folder / PARTS / (piece.name.split(".tar")[0] + ".files")).exists():
            shutil.copyfile(piece, folder / PARTS / piece.name)


def pieces_of(folder: Path, part: dict) -> list[Path]:
    """The pieces of a part that have come, in their order."""
    found = (folder / PARTS).glob(f"{part['name']}-{part['digest']}.tar*.*of{part['pieces']}")
    return sorted(found, key=lambda piece: int(piece.suffix[1:].split("of")[0]))


def listing(folder: Path, part: dict) -> Path:
    """Where the files of a part are listed once it is unpacked."""
    return folder / PARTS / f"{part['name']}-{part['digest']}.files"


def unpack(folder: Path, part: dict) -> None:
    """Unpack a part, in place of an older one of its name."""
    for older in (folder / PARTS).glob(f"{part['name']}-*.files"):
        if older.name.rpartition("-")[0] == part["name"]:
            for name in older.read_text().splitlines():
                (folder / name).unlink(missing_ok=True)
            older.unlink()
    pieces = pieces_of(folder, part)
    whole = folder / PARTS / f"{part['name']}.whole"
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as data:
                shutil.copyfileobj(data, out)
    with tarfile.open(whole, "r:*") as archive:
        names = [member.name for member in archive.getmembers()]
        archive.extractall(folder, filter="data")
    # All files of an archive have the same date, by which Python would take older bytecode for that of a new file.
    for place in {(folder / name).parent / "__pycache__" for name in names if name.endswith(".py")}:
        shutil.rmtree(place, ignore_errors=True)
    listing(folder, part).write_text("\n".join(names) + "\n")
    for file in (whole, *pieces):
        file.unlink()


def run(folder: Path, options: list[str]) -> int:
    """`make gpu` from the unpacked checkout; nothing is fetched: what is missing is an error of the step."""
    paths = [str(folder / "site/common"), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels"), "HF_HUB_OFFLINE": "1"}
    environment = os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("EAGLE_CACHE_DIR", str(folder / "cache"))
    command = [sys.executable, str(folder / "checkout/benchmarks/gpu/run.py"), "--site", str(folder / "site")]
    command += ["--engine", "all", "--out", str(folder / "results"), *options]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
