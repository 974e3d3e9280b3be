"""Builds the kernels of csrc/cuda for the CPU, under the emulation header in tests/kernels/cuda."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagle_plugin.kernels import build

EMULATION = Path(__file__).parents[1] / "kernels" / "cuda"
CSRC = Path(__file__).parents[2] / "csrc"
THREADS = ["-DEAGLE_EMULATION_THREADS", "-fsanitize=thread", "-g", "-O1", "-Wno-tsan"]


def build_emulated(csrc: Path, folder: Path, only: str = "*", others: Path | None = None) -> Path:
    """Build csrc/cuda into a library that has the kernels' names and takes CPU tensors.

    only: the one source to compile, the objects of the rest are in the folder `others`. CalledProcessError when g++
    refuses.
    """
    library = folder / "libeagle_emulated.so"
    objects = _compile(csrc, folder, only, others, ["-O1"])
    subprocess.run(["g++", "-shared", *objects, "-o", str(library), *build.link_flags()], check=True)
    return library


def build_driver(csrc: Path, folder: Path, only: str = "*", others: Path | None = None) -> Path:
    """Build race_driver.cc with the kernels, whose threads are threads, under ThreadSanitizer; see build_emulated."""
    driver = folder / "driver"
    objects = _compile(csrc, folder, only, others, THREADS)
    if others is None:
        objects.append(str(folder / "driver.o"))
        _run_compiler(csrc, EMULATION / "race_driver.cc", Path(objects[-1]), THREADS)
    link = build.link_flags()
    rpath = f"-Wl,-rpath,{link[0].removeprefix('-L')}"
    subprocess.run(["g++", "-fsanitize=thread", *objects, "-o", str(driver), *link, rpath], check=True)
    return driver


def _compile(csrc: Path, folder: Path, only: str, others: Path | None, flags: list[str]) -> list[str]:
    sources = sorted((csrc / "cuda").glob(f"{only}.cu"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        pairs = zip(sources, objects, strict=True)
        list(pool.map(lambda pair: _run_compiler(csrc, *pair, flags), pairs))
    names = {path.name for path in objects}
    rest = sorted(others.glob("*.o")) if others else []
    return [str(path) for path in (*objects, *(path for path in rest if path.name not in names))]


def _run_compiler(csrc: Path, source: Path, output: Path, flags: list[str]) -> None:
    common = [*build.CPU_FLAGS, "-march=native", "-x", "c++", "-include", "cuda_runtime.h", f"-I{EMULATION}"]
    command = ["g++", *common, *flags, *build.include_flags(csrc), "-c", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
