"""Find the native kernels: the shipped library, else a build on first use, else None (the torch oracles serve).

EAGLE_KERNELS    auto (default) | aot: the shipped library only | jit: the first-use build only | torch: no native code
EAGLE_CACHE_DIR  where the first-use build is kept (default ~/.cache/eagle-plugin)
EAGLE_LIBRARY    path of one library to load instead of all that (sanitizer builds)
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  before our library: its OpenMP runtime is the one that our kernels run on
from filelock import FileLock

from eagle_plugin.kernels import build

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parent.parent
MODES = ("auto", "aot", "jit", "torch")


def source_folder() -> Path | None:
    """Return csrc/: inside the package in a wheel, beside it in a checkout."""
    places = (PACKAGE / "csrc", PACKAGE.parent / "csrc")
    return next((place for place in places if (place / "cpu").is_dir()), None)


def shipped_library() -> Path | None:
    """Return the library that setup.py built for a CPU like this one, if there is one."""
    name = build.cpu_library(build.cpu_flags())
    path = PACKAGE / "lib" / name if name else None
    return path if path and path.exists() else None


def cache_dir() -> Path:
    """Return the folder of first-use builds."""
    return Path(os.environ.get("EAGLE_CACHE_DIR") or "~/.cache/eagle-plugin").expanduser() / "kernels"


def first_use_build() -> Path:
    """Return the library built for this very machine, building it when sources, compiler or CPU are new.

    Ranks that start together build once: one holds the lock, the others wait. RuntimeError when it cannot be built.
    """
    import tvm_ffi

    csrc, cxx = source_folder(), build.find_cxx()
    if csrc is None:
        raise RuntimeError(f"no csrc folder found in {PACKAGE} or beside it: reinstall eagle-plugin")
    if cxx is None:
        raise RuntimeError("no C++ compiler found, wanted g++, c++ or clang++ on PATH or $CXX: install g++")
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("include", "cpu") for p in (csrc / folder).rglob("*") if p.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    # the CPU is part of the key because a home directory may be shared by machines of several kinds
    traits = [*build.CPU_FLAGS, version, tvm_ffi.__version__, platform.machine(), *sorted(build.cpu_flags())]
    digest.update("\0".join(traits).encode())
    folder = cache_dir() / digest.hexdigest()[:16]
    library = folder / "libeagle_cpu.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not library.exists():
            log.info("building the CPU kernels in %s (once, about half a minute)", folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                output = Path(scratch) / library.name
                build.build_cpu(csrc, output, "native", cxx=cxx)
                output.replace(library)
    return library


@functools.cache
def load(kind: str = "cpu") -> Any | None:
    """Return the tvm-ffi module of native kernels, or None when the torch oracles are to serve.

    kind is "cpu". In mode auto a failed build is logged and answered with None; aot and jit raise RuntimeError instead.
    """
    if kind != "cpu":
        raise ValueError(f"kernel library {kind!r} is unknown, wanted 'cpu': other devices run the torch path")
    mode = os.environ.get("EAGLE_KERNELS") or "auto"
    if mode not in MODES:
        raise ValueError(f"EAGLE_KERNELS is {mode!r}, wanted one of {', '.join(MODES)}: change or unset it")
    if mode == "torch":
        return None
    import tvm_ffi

    if path := os.environ.get("EAGLE_LIBRARY"):
        return tvm_ffi.load_module(path)
    shipped = shipped_library() if mode != "jit" else None
    if shipped:
        return tvm_ffi.load_module(str(shipped))
    if mode == "aot":
        wanted = build.cpu_library(build.cpu_flags()) or "a library for a CPU with AVX2"
        raise RuntimeError(
            f"EAGLE_KERNELS=aot but {PACKAGE / 'lib'} has no {wanted}: reinstall, or use EAGLE_KERNELS=auto"
        )
    try:
        return tvm_ffi.load_module(str(first_use_build()))
    except (RuntimeError, OSError) as error:
        if mode == "jit":
            raise
        log.warning("no native CPU kernels, the slower torch path serves: %s", error)
        return None


@functools.cache
def function(name: str) -> Callable[..., Any] | None:
    """Return one native CPU kernel, or None when the torch oracles are to serve."""
    module = load("cpu")
    return None if module is None else module.get_function(name)


def backend() -> str:
    """Return which kernels serve CPU tensors: "native" or "torch"."""
    return "torch" if load("cpu") is None else "native"
