"""The shape of the draft trees, from vLLM's flags and `--additional-config '{"eagle_plugin": {...}}'`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import MAX_WIDTH, Shape
from eagle_plugin.policy.shapes import shape_for

KEY = "eagle_plugin"
WHERE = "--additional-config '{\"eagle_plugin\": {...}}'"


class OptionError(UserError):  # no ValueError: vLLM's configuration would bury it in one of its own
    """An option of the plugin that cannot be served; the message names it, what was found, what was wanted, the fix."""


@dataclass(frozen=True)
class Options:
    """What a user may set; absent numbers are chosen from num_speculative_tokens."""

    depth: int | None = None  # levels of the tree
    topk: int | None = None  # children per node
    async_scheduling: bool | None = None  # None: as vLLM decides, which switches it off on a CPU

    @classmethod
    def read(cls, additional_config: Any) -> Options:
        """The options in vLLM's `additional_config`. Raises OptionError."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise OptionError(f'{WHERE}: {KEY} is {given!r}, wanted an object such as {{"depth": 2, "topk": 4}}')
        known = {field.name for field in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise OptionError(f"{WHERE}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        for name in ("depth", "topk"):
            value = given.get(name, 1)
            if type(value) is not int or value < 1:
                raise OptionError(f"{WHERE}: {name} is {value!r}, wanted a whole number from 1 on")
        if type(given.get("async_scheduling", False)) is not bool:
            raise OptionError(f"{WHERE}: async_scheduling is {given['async_scheduling']!r}, wanted true or false")
        return cls(**given)

    def beside(self, engines: bool) -> Options:
        """The same with vLLM's own choice of asynchronous scheduling where the user made none."""
        return self if self.async_scheduling is not None else replace(self, async_scheduling=engines)

    def shape(self, draft_tokens: int, levels: int | None = None, on_gpu: bool = False) -> Shape:
        """The caps of a round that drafts this many tokens, the `num_speculative_tokens` of vLLM. Raises OptionError.

        levels: as of `shape_for`, of a head that drafts all of them in one forward.
        """
        width = draft_tokens + 1
        if width > MAX_WIDTH:
            raise OptionError(
                f"--speculative-config: num_speculative_tokens is {draft_tokens}, the plugin's trees have at most "
                f"{MAX_WIDTH - 1} drafted tokens: lower it, or start the server with EAGLE_PLUGIN=0"
            )
        shape = shape_for(draft_tokens, self.depth, self.topk, levels, on_gpu)
        if shape.steps > draft_tokens:
            raise OptionError(
                f"{WHERE}: depth {shape.steps} needs as many drafted tokens per round, --speculative-config has "
                f"num_speculative_tokens {draft_tokens}: raise it, or lower depth"
            )
        if shape.draft_slots > MAX_WIDTH:
            raise OptionError(
                f"{WHERE}: depth {shape.steps} and topk {shape.topk} make (depth - 1) * topk {shape.draft_slots}, "
                f"wanted at most {MAX_WIDTH}: lower depth or topk"
            )
        return shape
