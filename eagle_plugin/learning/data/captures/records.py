"""From an exchange on the wire to filtered records, in the form that `eagle-plugin data prepare` reads as a capture."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_plugin.learning.data.captures.routes import WHERE, read_exchange
from eagle_plugin.learning.data.privacy.filter import UNDECODED, PrivacyFilter, RawPrompt
from eagle_plugin.learning.data.sources.answers import RecordedAnswer
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.formats import CAPTURE_VERSION, Record
from eagle_plugin.learning.data.sources.prompts import Prompt, normalise
from eagle_plugin.traffic.frames import Exchange

FINISHED = ("stop", "length", "tool_calls", "function_call")


@dataclass
class Captured:
    """What became of one answer: a line to write, or the reason why there is none."""

    line: bytes | None = None
    dropped: str = ""
    found: int = 0  # values of private data


@dataclass
class _Ids:
    """The token ids that a server sent beside its texts (`return_token_ids` of the request)."""

    prompt: dict[int | None, list[int]] = field(default_factory=dict)  # by choice; None: of the whole answer
    answers: dict[int, list[int]] = field(default_factory=dict)  # by choice


def records_of(exchange: Exchange, private: PrivacyFilter, target: dict[str, str] | None = None) -> Iterator[Captured]:
    """One result per choice of the answer; nothing of a text that the filter has not seen is in a line.

    target: which one answered: its name and digests; every record says it.
    """
    try:
        read = read_exchange(exchange)
    except (ValueError, RecursionError, Unusable):
        yield Captured(dropped="unusable")
        return
    requests, answers = read.requests, read.answers
    about: dict[str, Any] = {"target": target} if target else {}
    if exchange.domain and private.passes(exchange.domain):
        about["domain"] = exchange.domain
    drafts = (exchange.accepted_drafts or _accepted_drafts(read.chunks)) if len(answers) == 1 else []
    ids = _token_ids(read.chunks)
    for index, answer in sorted(answers.items()):
        number = 0 if len(requests) == 1 else index // read.n
        if read.is_broken or answer.finish not in FINISHED:
            yield Captured(dropped="aborted")
        elif number >= len(requests):
            yield Captured(dropped="unusable")
        else:
            prompt_ids = ids.prompt.get(index) or (ids.prompt.get(None) if len(requests) == 1 else None)
            record = replace(requests[number], answer=answer)
            given_ids = prompt_ids, ids.answers.get(index)
            yield _capture(record, answer, exchange.time, given_ids, private, about, drafts)


def _capture(
    record: Record,
    answer: RecordedAnswer,
    time: float,
    given_ids: tuple[list[int] | None, list[int] | None],
    private: PrivacyFilter,
    about: dict[str, Any],
    drafts: list[int],
) -> Captured:
    try:
        prompt = normalise(record, keep_responses=True)
    except Unusable:  # such as images
        return Captured(dropped="unusable")
    if _says_nothing(prompt):
        return Captured(dropped="empty")
    result = private.apply(RawPrompt(WHERE, prompt))
    if result.prompt is None:
        undecoded = result.reason == UNDECODED
        return Captured(dropped="token_ids" if undecoded else "", found=result.found.total())
    ids = None if result.found else _kept_ids(given_ids, private)
    written = _record(result.prompt, answer.finish, time, ids, about)
    if drafts:
        written["response"]["accepted_drafts"] = drafts
    line = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
    return Captured((line + "\n").encode("utf-8", "replace"), found=result.found.total())


def _says_nothing(prompt: Prompt) -> bool:
    if prompt.messages is None:
        return not (prompt.response or {}).get("text")
    last = prompt.messages[-1]
    return last["role"] != "assistant" or not any(last.get(key) for key in ("content", "tool_calls"))


def _kept_ids(
    given: tuple[list[int] | None, list[int] | None], private: PrivacyFilter
) -> tuple[list[int], list[int]] | None:
    """The ids of prompt and answer if the filter can decode them and finds nothing.

    Their text can be more than the text beside them: a server can hide the reasoning, or cut a stop string.
    """
    prompt_ids, answer_ids = given
    if not (prompt_ids and answer_ids and private.decodes):
        return None
    result = private.apply(RawPrompt(WHERE, Prompt("", "", prompt_ids=prompt_ids, response={"token_ids": answer_ids})))
    return None if result.prompt is None or result.found else (prompt_ids, answer_ids)


def _record(
    prompt: Prompt,
    finish: str | None,
    time: float,
    ids: tuple[list[int], list[int]] | None,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The record of a filtered prompt with its answer; the id is random, so that it leads to nobody.

    about: what the server says of the answer, and no client; added as it is.
    """
    request: dict[str, Any] = dict(prompt.sampling)
    if prompt.tools:
        request["tools"] = prompt.tools
    response: dict[str, Any] = {"finish_reason": finish}
    if prompt.messages is not None:
        *request["messages"], message = prompt.messages
        response |= {"text": message.get("content") or "", "message": message}
    else:
        request["prompt"] = prompt.prompt if prompt.prompt is not None else prompt.prompt_ids
        response["text"] = (prompt.response or {})["text"]
    record = {"v": CAPTURE_VERSION, "id": uuid.uuid4().hex, "time": round(time, 3), "request": request}
    if ids:
        record["prompt_token_ids"], response["token_ids"] = ids
    return record | about | {"response": response}


def _token_ids(chunks: list[dict[str, Any]]) -> _Ids:
    ids = _Ids()
    for chunk in chunks:
        if _are_ids(chunk.get("prompt_token_ids")):
            ids.prompt.setdefault(None, chunk["prompt_token_ids"])
        choices = chunk.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else []):
            if not isinstance(choice, dict):
                continue
            index = choice.get("index", position)
            if _are_ids(choice.get("prompt_token_ids")):
                ids.prompt.setdefault(index, choice["prompt_token_ids"])
            if _are_ids(choice.get("token_ids")):
                ids.answers.setdefault(index, []).extend(choice["token_ids"])
    return ids


def _accepted_drafts(chunks: list[dict[str, Any]]) -> list[int]:
    """What vLLM tells with `--per-request-spec-decode-metrics`: trees that kept exactly 0, 1, 2, ... drafts."""
    for chunk in reversed(chunks):
        metrics = chunk.get("metrics")
        details = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        found: Any = details.get("acceptance_histogram") if isinstance(details, dict) else None
        if _are_ids(found):
            return list(found)
    return []


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)
