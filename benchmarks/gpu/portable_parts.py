"""Parts of what is carried to another machine: archives under names with a digest, in pieces of a limited size."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.portable_run import MANIFEST

SCRIPT = Path(__file__).with_name("portable_run.py")
RUN = "run.py"  # the script's name beside the parts


class Part(NamedTuple):
    """Files that are carried together. files: where each is, and its place below the folder it is unpacked into.

    steps: the names of the steps that need them; empty: every step does.
    """

    name: str
    files: list[tuple[Path, str]]
    compressed: bool = True  # False: for files that are compressed already
    steps: tuple[str, ...] = ()

    def digest(self) -> str:
        """Of all places, modes and contents."""
        seen = hashlib.sha256(str(self.compressed).encode())
        for source, place in sorted(self.files, key=lambda pair: pair[1]):
            seen.update(f"{place}\0{is_program(source)}\0{source.stat().st_size}\0".encode())
            with source.open("rb") as file:
                while block := file.read(1 << 20):
                    seen.update(block)
        return seen.hexdigest()[:12]

    def packed(self) -> bytes:
        """An archive, the same bytes for the same files."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for source, place in sorted(self.files, key=lambda pair: pair[1]):
                entry = tarfile.TarInfo(place)
                entry.size, entry.mode = source.stat().st_size, 0o755 if is_program(source) else 0o644
                with source.open("rb") as file:
                    archive.addfile(entry, file)
        return lzma.compress(buffer.getvalue(), preset=6) if self.compressed else buffer.getvalue()


def is_program(file: Path) -> bool:
    """Whether it can be executed."""
    return bool(file.stat().st_mode & 0o100)


def of_folder(name: str, folder: Path, place: str, large: int, steps: tuple[str, ...] = ()) -> list[Part]:
    """Parts of all files below a folder: one for all small files, and one for each with `large` bytes or more."""
    files = [(file, f"{place}/{file.relative_to(folder)}") for file in sorted(folder.rglob("*")) if file.is_file()]
    many = [pair for pair in files if pair[0].stat().st_size < large]
    parts = [Part(name, many, steps=steps)] if many else []
    for source, where in files:
        if source.stat().st_size >= large:
            parts.append(Part(f"{name}.{source.name.split('.')[0]}", [(source, where)], steps=steps))
    return parts


def write(parts: Iterable[Part], out: Path, limit: int) -> list[list[Path]]:
    """Write what has changed into new numbered folders, each of at most `limit` bytes beside the script.

    Folders of an earlier call keep the pieces that are still wanted, and lose the others. Returns the pieces by folder;
    each folder has the script and the whole manifest. What comes first in `parts` is in the first folders.
    """
    out.mkdir(parents=True, exist_ok=True)
    here = {piece.name: piece for piece in out.glob("*/*.tar*.*of*")}
    parts = list(parts)
    with ThreadPoolExecutor() as pool:  # compression leaves the interpreter to the others
        found = list(pool.map(lambda part: pieces_of(part, set(here), limit), parts))
    new = [piece for _, pieces in found for piece in pieces]
    wanted = {name for names, _ in found for name in names}
    manifest = [
        {
            "name": part.name,
            "digest": names[0].partition(".tar")[0].rpartition("-")[2],
            "pieces": len(names),
            "steps": part.steps,
        }
        for part, (names, _) in zip(parts, found, strict=True)
    ]
    for name, piece in here.items():
        if name not in wanted:
            piece.unlink()
    first = max((int(folder.name) for folder in out.iterdir() if folder.name.isdigit()), default=0) + 1
    for number, pieces_of_call in enumerate(into_calls(new, limit), start=first):
        (out / str(number)).mkdir()
        for name, data in pieces_of_call:
            (out / str(number) / name).write_bytes(data)
    text = json.dumps({"parts": manifest}, indent=1) + "\n"
    calls = []
    for folder in sorted((place for place in out.iterdir() if place.name.isdigit()), key=lambda place: int(place.name)):
        pieces_here = sorted(folder.glob("*.tar*.*of*"))
        if not pieces_here:
            shutil.rmtree(folder)
            continue
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        shutil.copyfile(SCRIPT, folder / RUN)
        calls.append(pieces_here)
    return calls


def pieces_of(part: Part, here: set[str], limit: int) -> tuple[list[str], list[tuple[str, bytes]]]:
    """The names of a part's pieces, and those with their bytes that are new, changed or incomplete."""
    stem = f"{part.name}-{part.digest()}.tar{'.xz' if part.compressed else ''}"
    names = sorted(name for name in here if name.startswith(f"{stem}."))
    if {int(name.rpartition("of")[2]) for name in names} == {len(names)}:
        return names, []
    data = part.packed()
    cuts = [data[first : first + limit] for first in range(0, len(data), limit)]
    pieces = [(f"{stem}.{number}of{len(cuts)}", cut) for number, cut in enumerate(cuts, start=1)]
    return [name for name, _ in pieces], pieces


def into_calls(pieces: list[tuple[str, bytes]], limit: int) -> list[list[tuple[str, bytes]]]:
    """The pieces in few groups of at most `limit` bytes, each in its turn into the first group with room."""
    groups: list[list[tuple[str, bytes]]] = []
    for piece in pieces:
        for group in groups:
            if sum(len(data) for _, data in group) + len(piece[1]) <= limit:
                group.append(piece)
                break
        else:
            groups.append([piece])
    return groups
