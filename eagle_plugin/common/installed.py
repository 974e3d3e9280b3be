"""Reads the versions of installed distributions."""

from __future__ import annotations

import functools
import importlib.metadata

# Their kernels run in the rounds of an engine, and each can be upgraded without the engine. SGLang's own had two names.
KERNEL_LIBRARIES = ("triton", "flashinfer-python", "sglang-kernel", "sgl-kernel")


def version_of(distribution: str) -> str:
    """The version of a distribution; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def install_command(extra: str = "", python: str = "") -> str:
    """How a user installs eagle-plugin, with what an extra of it names: no index has it.

    python: an interpreter, for whose environment it is; "" for the pip on PATH.
    """
    pip = f"{python} -m pip" if python else "pip"
    what = f"'.[{extra}]'" if extra else "."
    return f"{pip} install {what} in the folder of eagle-plugin, or the file of its wheel in place of the dot"


@functools.cache
def kernel_libraries() -> str:
    """The installed libraries of kernels, each with its version."""
    return " ".join(f"{name} {version}" for name in KERNEL_LIBRARIES if (version := version_of(name)))
