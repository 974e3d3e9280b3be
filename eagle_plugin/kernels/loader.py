"""Find the native kernels: a shipped library, else one built on first use, else none (then the torch oracles run).

eagle-plugin has one library for tensors on the CPU and one for CUDA, with the same functions. Another distribution may
add a library of its own over the same headers (`Library`, `open_library`).

EAGLE_KERNELS    auto (default) | aot: shipped libraries only | jit: first-use builds only | torch: no native code
EAGLE_CACHE_DIR  where first-use builds are kept (default: eagle-plugin in XDG_CACHE_HOME, or in ~/.cache)
EAGLE_LIBRARY    path of a file to load as the library for CPU tensors, whatever the above say (sanitizer builds)
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # before our library: its OpenMP runtime is the one that our kernels run on
import tvm_ffi
from filelock import FileLock

from eagle_plugin.common.cache_folder import cache_folder
from eagle_plugin.kernels import build

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parent.parent
KINDS = ("cpu", "cuda")
MODES = ("auto", "aot", "jit", "torch")
# What is put around every module that is opened; `runtime.graph_emulator` sees all launches by it.
wrap_module: Callable[[Any], Any] = lambda module: module  # noqa: E731


@dataclass(frozen=True)
class Library:
    """A native library: a folder of sources, compiled against the headers of eagle-plugin's csrc/."""

    name: str  # of the file: lib<name>.so
    kind: str  # "cpu": *.cc for the C++ compiler; "cuda": *.cu for nvcc
    sources: Path
    purpose: str  # what the functions are for, in messages
    override: str | None = None  # environment variable with the path of a file to load instead
    shipped_in: Path | None = None  # folder of builds that the package ships; None: it ships sources only

    def shipped(self) -> Path | None:
        """Return the build that the package ships for a machine like this one, if there is one."""
        name = self.shipped_name()
        path = self.shipped_in / name if self.shipped_in and name else None
        return path if path and path.exists() else None

    def shipped_name(self) -> str | None:
        """Return the file name of that build; None if none is made for this CPU."""
        return f"lib{self.name}.so" if self.kind == "cuda" else build.cpu_library(build.cpu_flags(), self.name)


def source_folder() -> Path | None:
    """Return csrc/: inside the package in a wheel, beside it in a checkout."""
    places = (PACKAGE / "csrc", PACKAGE.parent / "csrc")
    return next((place for place in places if (place / "cpu").is_dir()), None)


@functools.cache
def kernel_library(kind: str = "cpu") -> Library:
    """Return eagle-plugin's own library for "cpu" or "cuda" tensors; ValueError for any other kind."""
    if kind not in KINDS:
        raise ValueError(f"kernel library {kind!r} is unknown, wanted {' or '.join(KINDS)}: others run the torch path")
    return Library(
        name=f"eagle_{kind}",
        kind=kind,
        sources=(source_folder() or PACKAGE / "csrc") / kind,
        purpose=f"kernels for {kind} tensors",
        override="EAGLE_LIBRARY" if kind == "cpu" else None,
        shipped_in=PACKAGE / "lib",
    )


def cache_dir() -> Path:
    """Return the folder of first-use builds."""
    return cache_folder() / "kernels"


def gpu_arch() -> str:
    """Return the architecture of the current GPU as nvcc names it, "90" for compute capability 9.0."""
    return "".join(map(str, torch.cuda.get_device_capability()))


def first_use_build(library: Library) -> Path:
    """Return the library built for this machine; build it when sources, compiler, CPU or GPU are new.

    Ranks that start together build once: one holds the lock, the others wait. RuntimeError when it cannot be built.
    """
    csrc = source_folder()
    if csrc is None:
        raise RuntimeError(f"no csrc folder found in {PACKAGE} or beside it: reinstall eagle-plugin")
    cuda = library.kind == "cuda"
    compiler = build.require_nvcc() if cuda else build.require_cxx()
    folder = cache_dir() / _digest(library, csrc, compiler)
    file = folder / f"lib{library.name}.so"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not file.exists():
            log.info("building the %s in %s (once, about half a minute)", library.purpose, folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                output = Path(scratch) / file.name
                if cuda:
                    build.build_cuda(csrc, output, [gpu_arch()], compiler)
                else:
                    build.build_cpu(csrc, output, "native", cxx=compiler, sources=library.sources)
                output.replace(file)
    return file


def _digest(library: Library, csrc: Path, compiler: str) -> str:
    """A key of everything that the build depends on."""
    digest = hashlib.sha256()
    sources = {*library.sources.iterdir(), *csrc.rglob("*.h")}
    for path in sorted(path for path in sources if path.suffix in (".cc", ".cu", ".cuh", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    # the processor is part of the key because a home directory may be shared by machines of several kinds
    traits = [*build.CPU_FLAGS, platform.machine(), *sorted(build.cpu_flags())]
    if library.kind == "cuda":
        traits = [*build.CUDA_FLAGS, platform.machine(), gpu_arch()]
    digest.update("\0".join([*traits, version, tvm_ffi.__version__]).encode())
    return digest.hexdigest()[:16]


@functools.cache
def open_library(library: Library) -> Any | None:
    """Return the tvm-ffi module of a library, None when the torch path is to run instead.

    In mode auto a library that cannot be built or does not run here is logged and answered with None; aot and jit
    raise RuntimeError instead. A library that is not shipped is None in mode aot.
    """
    mode = os.environ.get("EAGLE_KERNELS") or "auto"
    if mode not in MODES:
        raise ValueError(f"EAGLE_KERNELS is {mode!r}, wanted one of {', '.join(MODES)}: change or unset it")
    if mode == "torch":
        return None
    if library.override and (path := os.environ.get(library.override)):
        return wrap_module(tvm_ffi.load_module(path))
    try:
        module = _open(library, mode)
        return None if module is None else wrap_module(module)
    except (RuntimeError, OSError) as error:
        if mode != "auto":
            raise
        log.warning("no native %s, the slower torch path serves: %s", library.purpose, error)
        return None


def _open(library: Library, mode: str) -> Any | None:
    shipped = library.shipped() if mode != "jit" else None
    if mode == "aot" and not shipped:
        if library.shipped_in is None:
            return None
        wanted = library.shipped_name() or "a library for a CPU with AVX2"
        raise RuntimeError(
            f"EAGLE_KERNELS=aot but {library.shipped_in} has no {wanted}: reinstall, or use EAGLE_KERNELS=auto"
        )
    try:
        return _tried(library, shipped or first_use_build(library))
    except (RuntimeError, OSError) as error:
        if mode != "auto" or not shipped or library.kind != "cuda":
            raise
        log.info("the %s that are shipped do not run here, so they are built: %s", library.purpose, error)
    return _tried(library, first_use_build(library))


def _tried(library: Library, path: Path) -> Any:
    module = tvm_ffi.load_module(str(path))
    if library.kind == "cuda":
        probe(module, "cuda")
    return module


def probe(module: Any, device: str) -> None:
    """Launch one kernel of a module: RuntimeError when it was built for other GPUs or for a newer driver."""
    parents = torch.zeros(1, 1, dtype=torch.int32, device=device)
    first_child = torch.zeros(1, 1, dtype=torch.int64, device=device)
    module.get_function("sibling_links")(parents, first_child, first_child.clone())


def load(kind: str = "cpu") -> Any | None:
    """Return the tvm-ffi module of kernels for "cpu" or "cuda" tensors, None when the torch oracles are to run."""
    return open_library(kernel_library(kind))


@functools.cache
def function(name: str, device: str = "cpu") -> Callable[..., Any] | None:
    """Return the native kernel for tensors on a device of this type, None when the torch oracle is to run."""
    module = load(device) if device in KINDS else None
    return None if module is None else module.get_function(name)


def backend(kind: str = "cpu") -> str:
    """Return which kernels run on "cpu" or "cuda" tensors: "native" or "torch"."""
    return "torch" if load(kind) is None else "native"


@functools.cache
def triton_module(name: str, purpose: str) -> ModuleType | None:
    """Return a module of kernels in Triton, None with EAGLE_KERNELS=torch or without Triton: then the torch path runs.

    purpose: what the torch path runs instead, in the warning.
    """
    if os.environ.get("EAGLE_KERNELS") == "torch":
        return None
    try:
        return importlib.import_module(f"eagle_plugin.kernels.{name}")
    except ImportError as error:
        log.warning("no Triton, the slower torch path runs %s on the GPU: %s", purpose, error)
        return None
