"""Recorded conversations as token ids: the prompt that a server would build, and the answer that would follow it."""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_plugin.data.rows import DataError

SHORTEST = 2  # response tokens that a turn needs to be trained on
# Put at the end of an answer that was cut, to see where the template ends it. No template begins an ending with it.
CONTINUATION = "\u2042"
HALF_CHARACTER = "\ufffd"  # in place of a character whose last bytes were cut off
PROBE = (
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "  4, of course. ", "reasoning_content": "An easy sum."},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "Six.", "reasoning_content": "Another one."},
)


@dataclass(frozen=True)
class RenderedTurn:
    """One assistant turn: mask 0 for the prompt's ids, 1 for the response's."""

    turn: int  # counts the assistant turns of the conversation from 0
    prompt_ids: list[int]
    response_ids: list[int]
    stopped: bool  # ends in a stop token


@dataclass(frozen=True)
class UntrainableTurn:
    """One assistant turn that cannot become a row, and the reason."""

    turn: int
    reason: str


class ChatRenderer:
    """Renders the assistant turns of conversations with a tokenizer's chat template.

    The response begins where the prompt that the server would build for the turn ends. So this works with any template.
    Prompt and response are tokenised separately, as in serving; in one piece, a token could span the border.

    Args:
        tokenizer: a transformers tokenizer; without a chat template it can render raw prompts only.
        stop_ids: tokens that end an answer.
        max_length: tokens of prompt and response together; a longer response is cut at its end.

    Raises:
        DataError: the chat template cannot render a plain question.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], max_length: int = 4096) -> None:
        self.tokenizer, self.stop_ids, self.max_length = tokenizer, frozenset(stop_ids), max_length
        self._merges_system = self._tags_are_right = False
        if not tokenizer.chat_template:  # a base model: raw prompts only
            return
        if self._render_prompt(PROBE[:1], {}) is None:
            raise DataError(f"the chat template of {tokenizer.name_or_path} cannot render a user turn; correct it")
        with_system = ({"role": "system", "content": "Be brief."}, *PROBE[:1])
        self._merges_system = self._render_prompt(with_system, {}) is None
        self._tags_are_right = self._check_tags()

    def render_turns(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        variables: dict[str, Any] | None = None,
        cut: bool = False,
    ) -> Iterator[RenderedTurn | UntrainableTurn]:
        """Yield one result per assistant turn of a conversation in normal form.

        Args:
            variables: other values that the template reads (chat_template_kwargs of the request).
            cut: the last answer was cut by its token limit: what the template writes after it, such as a stop token,
                was not generated and is left out.

        Raises:
            DataError: the tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{self.tokenizer.name_or_path} has no chat template; give the instruction-tuned target that is "
                "served, or raw prompts instead of messages"
            )
        messages = [self._tidy(message) for message in messages]
        turn, last = -1, len(messages) - 1
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                turn += 1
                if place:
                    values = {**(variables or {}), "tools": tools}
                    yield self._render_turn(turn, messages[: place + 1], values, cut and place == last)

    def join(self, turn: int, prompt_ids: list[int], response_ids: list[int]) -> RenderedTurn | UntrainableTurn:
        """Cut the response after its first stop token, and prompt and response together to `max_length`."""
        end = next((place for place, token in enumerate(response_ids) if token in self.stop_ids), None)
        response_ids = response_ids[: None if end is None else end + 1]
        room = self.max_length - len(prompt_ids)
        if room < SHORTEST:
            return UntrainableTurn(turn, "prompt too long")
        if len(response_ids) < SHORTEST:
            return UntrainableTurn(turn, "answer too short")
        stopped = end is not None and end < room
        return RenderedTurn(turn, prompt_ids, response_ids[:room], stopped)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around raw prompts."""
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)

    def _render_turn(
        self, turn: int, messages: Sequence[dict[str, Any]], variables: dict[str, Any], unfinished: bool
    ) -> RenderedTurn | UntrainableTurn:
        prompt = self._render_prompt(messages[:-1], variables)
        whole = self._render(messages, variables)
        if prompt is None or whole is None:
            return UntrainableTurn(turn, "template refuses the conversation")
        if unfinished and (whole := self._without_ending(messages, variables)) is None:
            return UntrainableTurn(turn, "cut, and the template does not show where")
        cut = self._find_cut(prompt, whole, self._render(messages[:-1], variables))
        if cut is not None:
            return self.join(turn, self.encode(whole[:cut]), self.encode(whole[cut:]))
        if self._tags_are_right and not unfinished:
            return self.join(turn, self.encode(prompt), self._tagged_ids(messages, variables))
        return UntrainableTurn(turn, "template rewrites history")

    def _without_ending(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
        """The text of the conversation without what the template writes after the last answer; None if it is hidden.

        It is what the text has in common with that of an answer that goes on.
        """
        *before, answer = messages
        if answer.get("tool_calls"):  # the template closes the brackets of a call that the answer left open
            return None
        part = "content" if answer["content"] else "reasoning_content"
        text = (answer.get(part) or "").rstrip(HALF_CHARACTER)
        whole, longer = (
            self._render([*before, {**answer, part: one}], variables) for one in (text, text + CONTINUATION)
        )
        return os.path.commonprefix([whole, longer]) if whole and longer and whole != longer else None

    def _find_cut(self, prompt: str, whole: str, history: str | None) -> int | None:
        """Where the response begins in `whole`; None if the template writes the earlier turns in another way there."""
        if whole.startswith(prompt):
            return len(prompt)
        if history is None or not whole.startswith(history):
            return None
        # The prompt begins the answer with text that this turn does not have, such as "<think>\n". The answer begins at
        # the start of the line where the two differ: "<think>" and "<tool_call>" have the same first letters, and a cut
        # inside the line would split the tag.
        common = next(place for place, (a, b) in enumerate(zip(prompt + "\0", whole + "\1", strict=False)) if a != b)
        line = whole.rfind("\n", len(history), common) + 1
        return line or None

    def _check_tags(self) -> bool:
        """Whether the template marks generated text, and on a probe marks the same text that the cut finds."""
        if not re.search(r"\{%[-+]?\s*generation\b", str(self.tokenizer.chat_template)):
            return False
        prompt, whole = self._render_prompt(PROBE[:3], {}), self._render(PROBE, {})
        cut = self._find_cut(prompt or "", whole or "", self._render(PROBE[:3], {}))
        if whole is None or not cut:
            return False
        found = self.join(1, self.encode(whole[:cut]), self.encode(whole[cut:]))
        tagged = self.join(1, self.encode(whole[:cut]), self._tagged_ids(PROBE, {}))
        return isinstance(found, RenderedTurn) and found == tagged

    def _tagged_ids(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
        """The ids of the text in the last turn that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not apply_chat_template(return_assistant_tokens_mask): it marks tokens of the whole text, and a token can
        # span the beginning of the turn.
        rendered: tuple[list[str], list[list[tuple[int, int]]]] = render_jinja_template(
            conversations=[self._merge_system(messages)],
            chat_template=self.tokenizer.get_chat_template(tools=variables.get("tools")),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **variables},
        )  # type: ignore[assignment]  # transformers annotates it as a string
        (text,), (spans,) = rendered
        start, end = spans[-1] if spans else (0, 0)
        return self.encode(text[start:end])

    def _render_prompt(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
        """The prompt that the server would build for the next answer; None if the template raises an error."""
        return self._render(messages, {**variables, "add_generation_prompt": True})

    def _render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
        """The text of the conversation; None if the template raises an error."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(self._merge_system(messages), tokenize=False, **variables)
        except (TemplateError, TypeError, ValueError, LookupError):  # a template can raise what any program can
            return None

    def _merge_system(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with system text put into the first user turn if the template has no system role."""
        if not self._merges_system:
            return list(messages)
        system = [message["content"] for message in messages if message["role"] == "system"]
        others = [message for message in messages if message["role"] != "system"]
        if system and others and others[0]["role"] == "user":
            others[0] = {**others[0], "content": "\n\n".join([*system, others[0]["content"]])}
        return others

    @staticmethod
    def _tidy(message: dict[str, Any]) -> dict[str, Any]:
        """The message with a text as content: many templates concatenate content without a check for None."""
        return {**message, "content": message.get("content") or ""}
