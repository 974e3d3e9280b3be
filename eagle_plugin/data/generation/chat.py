"""Recorded conversations as token ids: what the server would have read, and what the target would have generated."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_plugin.data.rows import DataError

SHORTEST = 2  # response tokens of a turn that can be trained on
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
class Untrainable:
    """One assistant turn that gives no row, and why."""

    turn: int
    reason: str


class ChatRenderer:
    """Renders the assistant turns of conversations with a tokenizer's chat template.

    A turn is cut where the prompt that the server would build for it ends, so no template needs to be understood.
    Prompt and response are tokenised apart, as in serving: tokenised together, tokens can merge across the cut.

    Args:
        tokenizer: a transformers tokenizer; without a chat template it serves for raw prompts only.
        stop_ids: tokens that end an answer.
        max_length: tokens of prompt and response together; the rest of a response is cut off.

    Raises:
        DataError: the chat template cannot render a plain question.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], max_length: int = 4096) -> None:
        self.tokenizer, self.stop_ids, self.max_length = tokenizer, frozenset(stop_ids), max_length
        self._merges_system = self._tags_are_right = False
        if not tokenizer.chat_template:  # of a base model, which is good for raw prompts
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
    ) -> Iterator[RenderedTurn | Untrainable]:
        """One result for every assistant turn of a conversation in normal form.

        Args:
            variables: what else the template reads (the request's chat_template_kwargs).

        Raises:
            DataError: the tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{self.tokenizer.name_or_path} has no chat template; give the instruction-tuned target that is "
                "served, or raw prompts instead of messages"
            )
        messages = [self._tidy(message) for message in messages]
        turn = -1
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                turn += 1
                if place:
                    yield self._render_turn(turn, messages[: place + 1], {**(variables or {}), "tools": tools})

    def join(self, turn: int, prompt_ids: list[int], response_ids: list[int]) -> RenderedTurn | Untrainable:
        """Cut the response after its first stop token and both to the longest length."""
        end = next((place for place, token in enumerate(response_ids) if token in self.stop_ids), None)
        response_ids = response_ids[: None if end is None else end + 1]
        room = self.max_length - len(prompt_ids)
        if room < SHORTEST:
            return Untrainable(turn, "prompt too long")
        if len(response_ids) < SHORTEST:
            return Untrainable(turn, "answer too short")
        stopped = end is not None and end < room
        return RenderedTurn(turn, prompt_ids, response_ids[:room], stopped)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around raw prompts."""
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)

    def _render_turn(
        self, turn: int, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
    ) -> RenderedTurn | Untrainable:
        prompt, whole = self._render_prompt(messages[:-1], variables), self._render(messages, variables)
        if prompt is None or whole is None:
            return Untrainable(turn, "template refuses the conversation")
        cut = self._find_cut(prompt, whole, self._render(messages[:-1], variables))
        if cut is not None:
            return self.join(turn, self.encode(whole[:cut]), self.encode(whole[cut:]))
        if self._tags_are_right:
            return self.join(turn, self.encode(prompt), self._tagged_ids(messages, variables))
        return Untrainable(turn, "template rewrites history")

    def _find_cut(self, prompt: str, whole: str, history: str | None) -> int | None:
        """Where the response begins in `whole`; None if the template writes earlier turns differently there."""
        if whole.startswith(prompt):
            return len(prompt)
        if history is None or not whole.startswith(history):
            return None
        # The prompt opens the answer with something that this turn lacks, such as "<think>\n". The answer begins on
        # the line where they part: within the line the cut could split a tag that both begin with the same letters.
        common = next(place for place, (a, b) in enumerate(zip(prompt + "\0", whole + "\1", strict=False)) if a != b)
        line = whole.rfind("\n", len(history), common) + 1
        return line or None

    def _check_tags(self) -> bool:
        """Whether the template marks generated text itself and marks what is found without the marks."""
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
        """The ids of the last turn's text that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not return_assistant_tokens_mask: it marks tokens of the whole text, which can span the turn's beginning.
        rendered: tuple[list[str], list[list[tuple[int, int]]]] = render_jinja_template(
            conversations=[self._merge_system(messages)],
            chat_template=self.tokenizer.get_chat_template(tools=variables.get("tools")),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **variables},
        )  # type: ignore[assignment]  # annotated as a string there
        (text,), (spans,) = rendered
        start, end = spans[-1] if spans else (0, 0)
        return self.encode(text[start:end])

    def _render_prompt(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
        """What the server reads before it answers; None if the template refuses it."""
        return self._render(messages, {**variables, "add_generation_prompt": True})

    def _render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
        """The conversation's text; None if the template refuses it."""
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(self._merge_system(messages), tokenize=False, **variables)
        except (TemplateError, TypeError, ValueError, LookupError):  # templates fail in the ways of any program
            return None

    def _merge_system(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with system text put before the first user turn if the template knows no system role."""
        if not self._merges_system:
            return list(messages)
        system = [message["content"] for message in messages if message["role"] == "system"]
        others = [message for message in messages if message["role"] != "system"]
        if system and others and others[0]["role"] == "user":
            others[0] = {**others[0], "content": "\n\n".join([*system, others[0]["content"]])}
        return others

    @staticmethod
    def _tidy(message: dict[str, Any]) -> dict[str, Any]:
        """A message with text as its content, since many templates add it to other text unasked."""
        return {**message, "content": message.get("content") or ""}


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a target's folder, without running code that comes with it.

    Raises:
        DataError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json; give the target's own folder")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder} has no tokenizer that loads ({reason}); give the target's own folder") from error


def stop_token_ids(folder: str | Path) -> list[int]:
    """The ids that end an answer of the target, ascending: eos_token_id of generation_config.json and config.json.

    Raises:
        DataError: neither file names one.
    """
    folder = Path(folder)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = json.loads(path.read_text()) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            eos = part.get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not found:
        raise DataError(f"{folder} names no eos_token_id in generation_config.json or config.json; add it there")
    return sorted(found)
