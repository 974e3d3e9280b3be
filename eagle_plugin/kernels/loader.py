"""Find the native kernels: the shipped library, else a build on first use, else None (the torch oracles serve).

There is one library for tensors on the CPU and one for CUDA, with the same functions.

EAGLE_KERNELS    auto (default) | aot: the shipped library only | jit: the first-use build only | torch: no native code
EAGLE_CACHE_DIR  where the first-use build is kept (default ~/.cache/eagle-plugin)
EAGLE_LIBRARY    path of one library to load for CPU tensors instead of all that (sanitizer builds)
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

import torch  # before our library: its OpenMP runtime is the one that our kernels run on
import tvm_ffi
from filelock import FileLock

from eagle_plugin.kernels import build

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parent.parent
KINDS = ("cpu", "cuda")
MODES = ("auto", "aot", "jit", "torch")


def source_folder() -> Path | None:
    """Return csrc/: inside the package in a wheel, beside it in a checkout."""
    places = (PACKAGE / "csrc", PACKAGE.parent / "csrc")
    return next((place for place in places if (place / "cpu").is_dir()), None)


def shipped_library(kind: str = "cpu") -> Path | None:
    """Return the library that setup.py built, on the CPU for one like this one, if there is one."""
    name = "libeagle_cuda.so" if kind == "cuda" else build.cpu_library(build.cpu_flags())
    path = PACKAGE / "lib" / name if name else None
    return path if path and path.exists() else None


def cache_dir() -> Path:
    """Return the folder of first-use builds."""
    return Path(os.environ.get("EAGLE_CACHE_DIR") or "~/.cache/eagle-plugin").expanduser() / "kernels"


def gpu_arch() -> str:
    """Return the architecture of the current GPU as nvcc names it, "90" for compute capability 9.0."""
    return "".join(map(str, torch.cuda.get_device_capability()))


def first_use_build(kind: str = "cpu") -> Path:
    """Return the library built for this very machine, building it when sources, compiler, CPU or GPU are new.

    Ranks that start together build once: one holds the lock, the others wait. RuntimeError when it cannot be built.
    """
    csrc = source_folder()
    if csrc is None:
        raise RuntimeError(f"no csrc folder found in {PACKAGE} or beside it: reinstall eagle-plugin")
    compiler = build.require_nvcc() if kind == "cuda" else build.require_cxx()
    digest = hashlib.sha256()
    for path in sorted(p for folder in ("include", kind) for p in (csrc / folder).rglob("*") if p.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    # the processor is part of the key because a home directory may be shared by machines of several kinds
    traits = [*build.CPU_FLAGS, platform.machine(), *sorted(build.cpu_flags())]
    if kind == "cuda":
        traits = [*build.CUDA_FLAGS, platform.machine(), gpu_arch()]
    digest.update("\0".join([*traits, version, tvm_ffi.__version__]).encode())
    folder = cache_dir() / digest.hexdigest()[:16]
    library = folder / f"libeagle_{kind}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not library.exists():
            log.info("building the %s kernels in %s (once, about half a minute)", kind, folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                output = Path(scratch) / library.name
                if kind == "cuda":
                    build.build_cuda(csrc, output, [gpu_arch()], compiler)
                else:
                    build.build_cpu(csrc, output, "native", cxx=compiler)
                output.replace(library)
    return library


@functools.cache
def load(kind: str = "cpu") -> Any | None:
    """Return the tvm-ffi module of kernels for "cpu" or "cuda" tensors, None when the torch oracles are to serve.

    In mode auto a library that cannot be built or does not run here is logged and answered with None; aot and jit
    raise RuntimeError instead.
    """
    if kind not in KINDS:
        raise ValueError(f"kernel library {kind!r} is unknown, wanted {' or '.join(KINDS)}: others run the torch path")
    mode = os.environ.get("EAGLE_KERNELS") or "auto"
    if mode not in MODES:
        raise ValueError(f"EAGLE_KERNELS is {mode!r}, wanted one of {', '.join(MODES)}: change or unset it")
    if mode == "torch":
        return None
    if kind == "cpu" and (path := os.environ.get("EAGLE_LIBRARY")):
        return tvm_ffi.load_module(path)
    try:
        return _open(kind, mode)
    except (RuntimeError, OSError) as error:
        if mode != "auto":
            raise
        log.warning("no native kernels for %s tensors, the slower torch path serves: %s", kind, error)
        return None


def _open(kind: str, mode: str) -> Any:
    shipped = shipped_library(kind) if mode != "jit" else None
    if mode == "aot" and not shipped:
        wanted = "libeagle_cuda.so"
        if kind == "cpu":
            wanted = build.cpu_library(build.cpu_flags()) or "a library for a CPU with AVX2"
        raise RuntimeError(
            f"EAGLE_KERNELS=aot but {PACKAGE / 'lib'} has no {wanted}: reinstall, or use EAGLE_KERNELS=auto"
        )
    module = tvm_ffi.load_module(str(shipped or first_use_build(kind)))
    if kind == "cuda":
        probe(module, "cuda")
    return module


def probe(module: Any, device: str) -> None:
    """Launch one kernel of a module: RuntimeError when it was built for other GPUs or for a newer driver."""
    token, root = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    module.get_function("verify_greedy")(token, root[:, None], token, root[:, None].clone(), root, token.clone())


@functools.cache
def function(name: str, device: str = "cpu") -> Callable[..., Any] | None:
    """Return the native kernel for tensors on a device of this type, None when the torch oracle is to serve."""
    module = load(device) if device in KINDS else None
    return None if module is None else module.get_function(name)


def backend(kind: str = "cpu") -> str:
    """Return which kernels serve tensors on "cpu" or "cuda": "native" or "torch"."""
    return "torch" if load(kind) is None else "native"
