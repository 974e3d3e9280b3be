"""The fields of a streamed chat answer that hold generated tokens: text, reasoning, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

# SGLang and older releases of vLLM stream thoughts under the first name, newer ones under the second, some under both.
REASONING = ("reasoning_content", "reasoning")


class Output(NamedTuple):
    """All that the target has generated for one answer; what two servers are compared by.

    The ids of tool calls are left out: each server invents its own.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()  # (name, arguments), in the order of their index

    def __bool__(self) -> bool:
        return any(self)


@dataclass
class StreamFields:
    """Collects the deltas of one choice."""

    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)  # by index: names, arguments

    def add(self, delta: Any) -> str:
        """Take one delta; returns the text that it adds to any field, empty where it carries no token."""
        pieces = []
        if delta.content:
            self._text.append(delta.content)
            pieces.append(delta.content)
        extra = delta.model_extra or {}
        thought = next((extra[name] for name in REASONING if extra.get(name)), "")
        if thought:
            self._reasoning.append(thought)
            pieces.append(thought)
        for call in delta.tool_calls or ():
            names, arguments = self._calls.setdefault(call.index, ([], []))
            function = call.function
            for parts, piece in ((names, function and function.name), (arguments, function and function.arguments)):
                if piece:
                    parts.append(piece)
                    pieces.append(piece)
        return "".join(pieces)

    @property
    def output(self) -> Output:
        """What has arrived so far."""
        calls = (("".join(names), "".join(arguments)) for _, (names, arguments) in sorted(self._calls.items()))
        return Output("".join(self._text), "".join(self._reasoning), tuple(calls))
