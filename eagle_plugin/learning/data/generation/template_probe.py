"""What a chat template does with an answer, found once per target by rendering made-up conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

# Put at the end or in the place of an answer, to see where the template ends it. No template begins an ending with it.
CONTINUATION = "\u2042"
PROBE = (
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "  4, of course. ", "reasoning_content": "An easy sum."},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "Six.", "reasoning_content": "Another one."},
)
ARGUMENTS = {"x": 3}
Render = Callable[[Sequence[dict[str, Any]]], str | None]  # the text of a conversation, None if the template fails


@dataclass(frozen=True)
class TemplateProbe:
    """What the probes showed.

    Args:
        ending: the text that the template writes after an answer.
        ends_in_stop: whether a stop token is in it; else nothing of it is learned, because the target did not write it.
        end_of_turn: the special token of the ending that serves as the stop token, if no stop token was in it.
        arguments_as_text: whether the template wants the arguments of a tool call as JSON text, and not as an object.
    """

    ending: str = ""
    ends_in_stop: bool = True
    end_of_turn: int | None = None
    arguments_as_text: bool = False

    @classmethod
    def of(cls, tokenizer: Any, stop_ids: Collection[int], render: Render) -> TemplateProbe:
        """Probe the template of a tokenizer."""
        text = render([PROBE[0], {"role": "assistant", "content": CONTINUATION}]) or ""
        _, found, ending = text.rpartition(CONTINUATION)
        ids = list(tokenizer(ending, add_special_tokens=False).input_ids) if found else []
        is_stop = any(token in stop_ids for token in ids)
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.content.strip()}
        end_of_turn = None if is_stop else next((token for token in ids if token in special), None)
        return cls(ending, is_stop or end_of_turn is not None, end_of_turn, _wants_text(render))

    def cut_ending(self, response: str) -> str:
        """The response without an ending that has no stop token."""
        return response if self.ends_in_stop else response.removesuffix(self.ending)

    def in_argument_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with the arguments of its tool calls in the form that the template wants."""
        if not (self.arguments_as_text and message.get("tool_calls")):
            return message
        return {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _wants_text(render: Render) -> bool:
    """Whether a call renders with text only, or an object comes out as Python writes it, which is no JSON."""
    call = {"id": "call12345", "type": "function", "function": {"name": "find", "arguments": ARGUMENTS}}

    def rendered(one: dict[str, Any]) -> str | None:
        return render([PROBE[0], {"role": "assistant", "content": "", "tool_calls": [one]}])

    as_object = rendered(call)
    if as_object is not None and str(ARGUMENTS) not in as_object:
        return False
    return rendered(_as_text(call)) is not None
