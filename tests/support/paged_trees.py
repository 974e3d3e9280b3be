"""A plugin for the test server: trees with pages of several tokens on a CPU.

There SGLang takes chains alone with such pages, because of its own drafting; on a GPU some attention backends take
trees. So the server is given a chain, and the caps of its trees come after SGLang has looked at the flags. And where a
decode round begins, SGLang calls a Triton kernel also on a CPU; its own torch function takes that place.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "EAGLE_TEST_TREE"  # steps/topk/nodes


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle_plugin.sglang.plugin import RESOLVE_ARGUMENTS

    HookRegistry.register(RESOLVE_ARGUMENTS, _give_trees, HookType.AFTER)
    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", _last_slots, HookType.AROUND)


def _last_slots(original: Any, *arguments: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*arguments)


def _give_trees(result: Any, server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import declare_resolution

    steps, topk, width = map(int, os.environ[VARIABLE].split("/"))
    declare_resolution(
        server_args,
        "paged_trees",
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=width,
    )
    return result
