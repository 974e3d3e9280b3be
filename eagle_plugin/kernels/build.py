"""Compile native libraries with the installed compiler. setup.py uses this too, so torch is not imported here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CPU_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]
# -march=native alone also tunes for the CPU that GCC 12 believes this to be: tree attention was 8 to 18 % slower.
CPU_FLAGS += ["-mtune=generic", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi"]
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xfatbin", "-compress-all"]
AVX2 = frozenset({"avx2", "fma", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this machine's CPU by their names in /proc/cpuinfo; empty if it cannot be read."""
    try:
        with open("/proc/cpuinfo") as f:
            return frozenset(next(line for line in f if line.startswith("flags")).split()[2:])
    except (OSError, StopIteration):
        return frozenset()


def cpu_library(flags: frozenset[str], name: str = "eagle_cpu") -> str | None:
    """Return the file name of the shipped library for a CPU with these flags; None if no library is shipped for it."""
    if flags >= AVX512:
        return f"lib{name}_v4.so"
    return f"lib{name}_v3.so" if flags >= AVX2 else None


def find_cxx() -> str | None:
    """Return the C++ compiler: $CXX, else g++, c++ or clang++ from PATH."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def find_nvcc() -> str | None:
    """Return nvcc: from $CUDA_HOME/bin, else from PATH, else from /usr/local/cuda/bin."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = ([f"{home}/bin"] if home else []) + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return next((found for place in places if (found := shutil.which("nvcc", path=place))), None)


def require_cxx() -> str:
    """Return the C++ compiler; RuntimeError when there is none."""
    if cxx := find_cxx():
        return cxx
    raise RuntimeError("no C++ compiler found, wanted g++, c++ or clang++ on PATH or $CXX: install g++")


def require_nvcc() -> str:
    """Return nvcc; RuntimeError when there is none."""
    if nvcc := find_nvcc():
        return nvcc
    raise RuntimeError("no nvcc found, wanted it on PATH or under $CUDA_HOME: install the CUDA toolkit")


def include_flags(csrc: Path) -> list[str]:
    """Return the -I options for the headers of csrc (<eagle/..>, <bindings/..>, <cpu/..>) and of tvm-ffi."""
    from tvm_ffi import libinfo

    found = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    return [f"-I{csrc / 'include'}", f"-I{csrc}", *(f"-I{path}" for path in found)]


def link_flags() -> list[str]:
    """Return the options that link tvm-ffi; the process has loaded it before it loads our library."""
    from tvm_ffi import libinfo

    return [f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi", "-ldl"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr[-4000:]}")


def _compile(command: list[str], sources: list[Path], output: Path, link: list[str]) -> None:
    """Compile the sources, several at a time, and link them into a shared library."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        pairs = zip(sources, objects, strict=True)
        list(pool.map(_run, ([*command, "-c", str(source), "-o", object_] for source, object_ in pairs)))
        _run([*link, "-shared", *objects, "-o", str(output), *link_flags()])


def build_cpu(
    csrc: Path,
    output: Path,
    march: str,
    extra: list[str] | None = None,
    cxx: str | None = None,
    sources: Path | None = None,
) -> None:
    """Compile csrc/cpu/*.cc and link them; RuntimeError has the compiler's message.

    sources: another folder of *.cc files to compile instead, against the headers of csrc.
    """
    cxx = cxx or require_cxx()
    command = [cxx, *CPU_FLAGS, f"-march={march}", *(extra or []), *include_flags(csrc)]
    _compile(command, sorted((sources or csrc / "cpu").glob("*.cc")), output, [cxx, *(extra or [])])


def build_cuda(csrc: Path, output: Path, archs: list[str], nvcc: str | None = None) -> None:
    """Compile csrc/cuda/*.cu for the given architectures ("90"); cudart is static so that it loads without a GPU."""
    nvcc = nvcc or require_nvcc()
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    targets.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")  # PTX for GPUs to come
    command = [nvcc, *CUDA_FLAGS, *targets, *include_flags(csrc)]
    _compile(command, sorted((csrc / "cuda").glob("*.cu")), output, [nvcc, *targets, "-cudart", "static"])
