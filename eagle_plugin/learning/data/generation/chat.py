"""Recorded conversations as token ids: the prompt that a server would build, and the answer that would follow it."""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_plugin.learning.data.generation.template_probe import CONTINUATION, PROBE, TemplateProbe
from eagle_plugin.learning.data.rows import DataError

SHORTEST = 2  # response tokens that a turn needs to be trained on
HALF_CHARACTER = "\ufffd"  # in place of a character whose last bytes were cut off
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


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
    The response holds the recorded text as it was recorded, also where the template writes it in another way; a turn
    for which that is not possible is an `UntrainableTurn`.

    Args:
        tokenizer: a transformers tokenizer; without a chat template it can render raw prompts only.
        stop_ids: tokens that end an answer. If the template ends an answer with another special token, that one is
            added.
        max_length: tokens of prompt and response together; a longer response is cut at its end.

    Raises:
        DataError: the chat template cannot render a plain question.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], max_length: int = 4096) -> None:
        self.tokenizer, self.stop_ids, self.max_length = tokenizer, frozenset(stop_ids), max_length
        self._merges_system = self._tags_are_right = False
        self._probe = TemplateProbe()
        if not tokenizer.chat_template:  # a base model: raw prompts only
            return
        if self._render_prompt(PROBE[:1], {}) is None:
            raise DataError(f"the chat template of {tokenizer.name_or_path} cannot render a user turn; correct it")
        with_system = ({"role": "system", "content": "Be brief."}, *PROBE[:1])
        self._merges_system = self._render_prompt(with_system, {}) is None
        self._probe = TemplateProbe.of(tokenizer, self.stop_ids, lambda messages: self._render(messages, {}))
        if self._probe.end_of_turn is not None:
            self.stop_ids |= {self._probe.end_of_turn}
        self._tags_are_right = self._check_tags()

    @property
    def writes_date(self) -> bool:
        """Whether the template writes the day on which it is rendered."""
        return "strftime_now" in str(self.tokenizer.chat_template or "")

    @property
    def end_of_turn(self) -> str | None:
        """The special token with which the template ends an answer, if it was not among the stop tokens given."""
        token = self._probe.end_of_turn
        return None if token is None else str(self.tokenizer.convert_ids_to_tokens(token))

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
        answer = messages[-1]
        if not (answer["content"] or answer.get("reasoning_content") or answer.get("tool_calls")):
            return UntrainableTurn(turn, "empty answer")
        prompt = self._render_prompt(messages[:-1], variables)
        whole = self._render(messages, variables)
        if prompt is None or whole is None:
            return UntrainableTurn(turn, "template refuses the conversation")
        if unfinished and (whole := self._without_ending(messages, variables)) is None:
            return UntrainableTurn(turn, "cut, and the template does not show where")
        history = self._render(messages[:-1], variables)
        cut = self._find_cut(prompt, whole, history)
        if cut is not None:
            before, response = whole[:cut], whole[cut:]
        elif self._tags_are_right and not unfinished:
            before, response = prompt, self._tagged_text(messages, variables)
        else:
            return UntrainableTurn(turn, "template rewrites history")
        if not _holds(answer, response):
            replaced = self._with_recorded_text(messages, variables, prompt, history, unfinished)
            if replaced is None:
                return UntrainableTurn(turn, "template changes the answer")
            before, response = replaced
        if self._stops_within(answer["content"]):
            return UntrainableTurn(turn, "stop token inside of the answer")
        return self.join(turn, self.encode(before), self.encode(self._probe.cut_ending(response)))

    def _with_recorded_text(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        prompt: str,
        history: str | None,
        unfinished: bool,
    ) -> tuple[str, str] | None:
        """Prompt and response with the recorded text in the place where the template writes another form of it.

        The place is where the template writes a mark that it does not change. None if the answer is more than one text,
        or there is no such place.
        """
        *others, answer = messages
        if answer.get("reasoning_content") or answer.get("tool_calls"):
            return None
        marked = self._render([*others, {**answer, "content": CONTINUATION}], variables)
        cut = None if marked is None else self._find_cut(prompt, marked, history)
        if marked is None or cut is None or marked.count(CONTINUATION, cut) != 1:
            return None
        before, text = marked[:cut], answer["content"].rstrip(HALF_CHARACTER) if unfinished else answer["content"]
        start, _, ending = marked[cut:].partition(CONTINUATION)
        if END_OF_THOUGHT in text:  # all that the target wrote after the prompt, its thoughts too
            before, start = prompt, ""
            text = text[_overlap(prompt, text) :]
            if prompt.rstrip().endswith(THOUGHT) and text.lstrip().startswith(THOUGHT):
                return None
        return before, start + text + ("" if unfinished else ending)

    def _stops_within(self, content: str) -> bool:
        """Whether a recorded text goes on after a stop token: the row would end there."""
        ids = self.encode(content)
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        return end is not None and bool(self.tokenizer.decode(ids[end + 1 :], skip_special_tokens=True).strip())

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
        tagged = self.join(1, self.encode(whole[:cut]), self.encode(self._tagged_text(PROBE, {})))
        return isinstance(found, RenderedTurn) and found == tagged

    def _tagged_text(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The text in the last turn that the template marks as generated."""
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
        return text[start:end]

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

    def _tidy(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with a text as content: many templates concatenate content without a check for None."""
        return self._probe.in_argument_form({**message, "content": message.get("content") or ""})


def _holds(answer: dict[str, Any], response: str) -> bool:
    """Whether a response has all that was recorded of the answer, as it was recorded.

    Reasoning and the text after it were taken apart by a parser, so white space around them is not the target's. Of a
    tool call the target's own form is not known; its name must be there.
    """
    content, thoughts = answer["content"].rstrip(HALF_CHARACTER), (answer.get("reasoning_content") or "").strip()
    parts = [content.strip() if thoughts else content, thoughts.rstrip(HALF_CHARACTER)]
    parts += [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    return all(part in response for part in parts)


def _overlap(before: str, text: str) -> int:
    """How many characters at the end of one text are the beginning of the other."""
    most = min(len(before), len(text))
    return next((size for size in range(most, 0, -1) if before.endswith(text[:size])), 0)
