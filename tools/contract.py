"""What a release of an engine changes of the names that the plugin touches: the first hour of every release.

    make contract ENGINE=vllm VERSION=0.34.0
    python tools/contract.py vllm 0.34.0 [--base 0.33.0] [--out out]

Both releases are fetched from the package index and only read, not installed. Every name that the adapter imports,
replaces, calls or reads (`engine_contract.py` of its adapter) is compared by its syntax tree with the one of the base,
the newest tested release: "gone" and "parameters" have to be looked at; look at a "body" where the plugin relies
on more than the name. "wanted" says what the adapter cannot do with. The result is in out/contract-ENGINE-VERSION.json;
the exit code is 1 where something is wanted.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.errors import UserError
from eagle_plugin.runtime.engine_contract import differences, touched_places, wanted_names
from eagle_plugin.runtime.engine_source import EngineSource

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("sglang", "vllm")
COMPAT = ROOT / "compat/sglang-cpu/src"
ORDER = ("gone", "new", "parameters", "body", "same")


class Change(Strict):
    """One name in two releases."""

    name: str
    change: str  # one of ORDER
    base: str = ""  # parameters, where they changed
    found: str = ""


class Document(Strict):
    """out/contract-ENGINE-VERSION.json."""

    engine: str
    version: str
    base: str
    names: dict[str, int]  # how many of each kind of change
    wanted: list[str]  # what the adapter cannot do with
    changes: list[Change]  # without those that are the same


class Release(NamedTuple):
    version: str
    source: EngineSource


def fetch(engine: str, version: str, folder: Path) -> Release:
    """A release from the package index, its Python files below `folder`. Raises UserError where there is none."""
    if not version.replace(".", "").replace("rc", "").replace("post", "").isalnum():
        raise UserError(f"VERSION is {version!r}, wanted a release of {engine} such as 0.33.0")
    place = folder / version
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(place), f"{engine}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(f"{engine} {version} cannot be fetched from the package index: {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(place, [name for name in wheel.namelist() if name.endswith(".py")])
    return Release(version, EngineSource(place, engine))


def wanted_of(engine: str) -> dict[str, str]:
    """Every name that the adapter touches; for SGLang also those of the package for CPUs."""
    contract = importlib.import_module(f"eagle_plugin.{engine}.engine_contract").CONTRACT
    wanted = wanted_names(engine, ROOT / "eagle_plugin" / engine, contract)
    return dict.fromkeys(touched_places(engine, COMPAT), "") | wanted


def compare(base: EngineSource, found: EngineSource, names: list[str]) -> list[Change]:
    """How each name differs; in the order of ORDER, then by name."""
    changes = []
    for name in names:
        old, new = base.find(name), found.find(name)
        if new is None or old is None:
            kind = "gone" if new is None else "new"
            changes.append(Change(name=name, change=kind))
        elif old.parameters != new.parameters:
            both = [" ".join(one.parameters or ("no function",)) for one in (old, new)]
            changes.append(Change(name=name, change="parameters", base=both[0], found=both[1]))
        else:
            changes.append(Change(name=name, change="same" if old.digest == new.digest else "body"))
    return sorted(changes, key=lambda one: (ORDER.index(one.change), one.name))


def show(document: Document, console: Console) -> None:
    """The result as a table; bodies are only counted."""
    table = Table(title=f"{document.engine} {document.version} against {document.base}", title_justify="left")
    for column in ("name", "change", "in the base", "found"):
        table.add_column(column, overflow="fold")
    for one in document.changes:
        if one.change != "body":
            table.add_row(one.name, one.change, one.base, one.found)
    if table.rows:
        console.print(table)
    console.print(f"{sum(document.names.values())} names: {', '.join(f'{n} {k}' for k, n in document.names.items())}")
    for line in document.wanted:
        console.print(f"wanted otherwise: {line}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("version", help="a release on the package index, such as 0.33.0")
    parser.add_argument("--base", help="compare with this release (default: the newest tested one)")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args(arguments)
    tested = importlib.import_module(f"eagle_plugin.{given.engine}.version").TESTED
    wanted = wanted_of(given.engine)
    try:
        with tempfile.TemporaryDirectory() as folder:
            base = fetch(given.engine, given.base or tested[-1], Path(folder))
            found = fetch(given.engine, given.version, Path(folder))
            changes = compare(base.source, found.source, list(wanted))
            missing = differences(found.source, wanted)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = Counter(one.change for one in changes)
    document = Document(
        engine=given.engine,
        version=found.version,
        base=base.version,
        names={kind: counts[kind] for kind in ORDER if counts[kind]},
        wanted=[str(one) for one in missing],
        changes=[one for one in changes if one.change != "same"],
    )
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"contract-{given.engine}-{given.version}.json"
    write_output(path, [document.model_dump_json(indent=2)])
    show(document, Console())
    print(f"wrote {path}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
