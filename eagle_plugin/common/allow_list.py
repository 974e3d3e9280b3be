"""The engines' lists of plugins: a list without this plugin drops it, and neither engine says so in its log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

ENTRY_POINT = "eagle_plugin"  # the name of ours in both groups


class AllowList(NamedTuple):
    """The environment variable with which a user chooses an engine's plugins, as that engine reads it."""

    variable: str
    empty_allows_all: bool  # SGLang takes an empty list for none, vLLM for a list of nothing
    strips: bool  # whether spaces around a name are dropped

    def drops(self, name: str = ENTRY_POINT, environment: Mapping[str, str] = os.environ) -> bool:
        """Whether the list is set and leaves out the plugin of this name."""
        names = environment.get(self.variable)
        if names is None or (not names and self.empty_allows_all):
            return False
        return name not in ([part.strip() for part in names.split(",")] if self.strips else names.split(","))

    def sentence(self, environment: Mapping[str, str] = os.environ) -> str:
        """What a user reads where the list drops us."""
        return (
            f"{self.variable} is {environment.get(self.variable)!r} and does not name {ENTRY_POINT}, so that the "
            "engine drops the plugin and does not say so"
        )

    def repaired(self, name: str = ENTRY_POINT, environment: Mapping[str, str] = os.environ) -> str:
        """The variable as it has to be."""
        names = [part.strip() for part in environment.get(self.variable, "").split(",")]
        return f"{self.variable}={','.join([*filter(None, names), name])}"


ALLOW_LISTS = {
    "sglang": AllowList("SGLANG_PLUGINS", empty_allows_all=True, strips=True),
    "vllm": AllowList("VLLM_PLUGINS", empty_allows_all=False, strips=False),
}
