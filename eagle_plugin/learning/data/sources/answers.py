"""Reads recorded answers of inference servers: OpenAI and TGI response bodies, streamed or not."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = "unfinished"  # the finish reason of an answer whose record says that there is none
# With which an answer is whole, or was cut at its end by a limit or a stop; of OpenAI, TGI, Anthropic, and captures.
FINISHED = {
    *("stop", "length", "tool_calls", "function_call"),
    *("eos_token", "eos", "stop_sequence", "end_turn", "max_tokens", "tool_use", "recorded"),
}


@dataclass
class RecordedAnswer:
    """A recorded answer: a chat message or a raw text, and the token ids and finish reason if they were recorded.

    The reason is None where the record has no place for one, and `UNFINISHED` where the place is empty.
    """

    message: dict[str, Any] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish: str | None = None


def read_answers(body: Any) -> dict[int, RecordedAnswer]:
    """The answers in a response body, by index of the choice; empty if it has none (an error, an unknown form).

    Args:
        body: a decoded `chat.completion`, `text_completion` or TGI body, or the text of a stream of events.
    """
    if isinstance(body, str):
        return _join_stream(body)
    if isinstance(body, list):  # TGI and LMI: one entry per input, itself in a list in some versions
        parts = [part[0] if isinstance(part, list) and part else part for part in body]
        found = {index: read_answers(part) for index, part in enumerate(parts) if isinstance(part, dict)}
        return {index: answers[0] for index, answers in found.items() if 0 in answers}
    if not isinstance(body, dict):
        return {}
    if isinstance(body.get("generated_text"), str):
        return {0: RecordedAnswer(text=body["generated_text"], finish=_finish(body.get("details")))}
    answers = {}
    for position, choice in enumerate(_dicts(body.get("choices"))):
        message, text = choice.get("message"), choice.get("text")
        answers[index_of(choice, position)] = RecordedAnswer(
            message if isinstance(message, dict) else None,
            text if isinstance(text, str) else None,
            finish=_whole_finish(choice),
        )
    return {index: answer for index, answer in answers.items() if answer.message or answer.text is not None}


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The JSON objects in a list; anything else that a recorder wrote is ignored."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def index_of(holder: dict[str, Any], default: int) -> int:
    """The number that a choice or a part of it names as its own."""
    index = holder.get("index")
    return index if isinstance(index, int) else default


def _finish(holder: Any) -> str | None:
    reason = holder.get("finish_reason") if isinstance(holder, dict) else None
    return reason if isinstance(reason, str) else None


def _whole_finish(holder: dict[str, Any]) -> str | None:
    """The reason of an answer that is recorded in one piece."""
    return _finish(holder) or (UNFINISHED if "finish_reason" in holder else None)


_SPECIAL = re.compile(r"<[^<>\s]+>")  # </s>, <|im_end|>, <end_of_turn>


@dataclass
class _Stream:
    """One choice of a streamed answer, collected from its chunks."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish: str | None = None
    chat: bool = False

    def add_delta(self, delta: dict[str, Any]) -> None:
        self.chat = True
        self.content.append(_text(delta.get("content")))
        self.reasoning.append(_text(delta.get("reasoning_content") or delta.get("reasoning")))
        for piece in _dicts(delta.get("tool_calls")):
            empty = {"id": None, "function": {"name": "", "arguments": ""}}
            call = self.calls.setdefault(index_of(piece, 0), empty)
            call["id"] = call["id"] or piece.get("id")
            for function in _dicts([piece.get("function")]):
                for key in ("name", "arguments"):
                    call["function"][key] += _text(function.get(key))

    def add_token(self, event: dict[str, Any], token: dict[str, Any]) -> None:
        """An event of TGI or LMI. Its last one has the whole text too, without special tokens, in `generated_text`."""
        finish = _finish(event.get("details"))
        self.finish = finish or self.finish
        text = _text(token.get("text"))
        # "special" is TGI's mark, "special_token" LMI's; not all versions write one.
        special = token.get("special") is True or token.get("special_token") is True
        if not (special or (finish == "eos_token" and _SPECIAL.fullmatch(text))):
            self.content.append(text)
        if isinstance(event.get("generated_text"), str):
            self.content = [event["generated_text"]]
            self.finish = self.finish or "recorded"  # details come on demand only

    def to_answer(self) -> RecordedAnswer:
        text, finish = "".join(self.content), self.finish or UNFINISHED  # a stream that was cut off
        if not self.chat:
            return RecordedAnswer(text=text, finish=finish)
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return RecordedAnswer(message=message, finish=finish)


def _join_stream(text: str) -> dict[int, RecordedAnswer]:
    """The answers in a recorded stream: server-sent events (`data: {chunk}` lines) or plain JSON lines."""
    streams: dict[int, _Stream] = {}
    # Not splitlines(): it also splits at U+2028 and the like, which a JSON string may hold as they are.
    for line in text.replace("\r", "\n").split("\n"):
        chunk = _decode_event(line)
        if isinstance(chunk.get("token"), dict):  # TGI and LMI
            streams.setdefault(0, _Stream()).add_token(chunk, chunk["token"])
        for choice in _dicts(chunk.get("choices")):
            stream = streams.setdefault(index_of(choice, 0), _Stream())
            if isinstance(choice.get("delta"), dict):
                stream.add_delta(choice["delta"])
            elif isinstance(choice.get("text"), str):
                stream.content.append(choice["text"])
            stream.finish = _finish(choice) or stream.finish
    return {index: stream.to_answer() for index, stream in streams.items()}


def _decode_event(line: str) -> dict[str, Any]:
    try:
        chunk = json.loads(line.removeprefix("data:"))
    except (ValueError, RecursionError):  # blank lines, comments, [DONE], a chunk cut by the recorder
        return {}
    return chunk if isinstance(chunk, dict) else {}
