"""Names the SGLang releases that this adapter was tested with; `engine_contract` has what it touches of them."""

from __future__ import annotations

from importlib import metadata

TESTED = ("0.5.22", "0.5.23")


def installed() -> str:
    """The version of the installed SGLang."""
    return metadata.version("sglang")
