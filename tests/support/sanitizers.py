"""A library built with AddressSanitizer and UndefinedBehaviorSanitizer, and the environment that loads it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from eagle_plugin.kernels import build, loader

FLAGS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def runtime(name: str) -> str:
    """Return the path of a sanitizer's runtime library; not absolute where g++ has none."""
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


needs_sanitizers = pytest.mark.skipif(
    not shutil.which("g++") or not os.path.isabs(runtime("libasan.so")), reason="needs g++ with libasan"
)


def sanitized_environment(library: loader.Library, folder: Path) -> dict[str, str]:
    """Build a library with sanitizers into the folder; return the environment of a process that runs on it."""
    csrc = loader.source_folder()
    assert csrc is not None and library.override is not None
    output = folder / f"lib{library.name}_asan.so"
    build.build_cpu(csrc, output, "native", extra=FLAGS, cxx=shutil.which("g++"), sources=library.sources)
    return os.environ | {
        library.override: str(output),
        "EAGLE_KERNELS": "",
        "EAGLE_TEST_EXAMPLES": "12",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": " ".join(map(runtime, ("libasan.so", "libubsan.so"))),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
