"""The SGLang releases that this adapter was tested with; tests/engines/sglang/test_contract*.py pin what it touches."""

from __future__ import annotations

from importlib import metadata

TESTED = ("0.5.22", "0.5.23")


def installed() -> str:
    """The version of the installed SGLang."""
    return metadata.version("sglang")
