"""Reads exchanges of a server, filters them, and brings them to the form of records that `data prepare` reads."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_plugin.learning.data.privacy.filter import UNDECODED, PrivacyFilter, RawPrompt
from eagle_plugin.learning.data.rows import are_ids
from eagle_plugin.learning.data.sources.answers import RecordedAnswer, index_of, read_answers
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.formats import RECORDING_VERSION, Record, parse_record
from eagle_plugin.learning.data.sources.prompts import Prompt, normalise
from eagle_plugin.learning.data.sources.request_fields import changes_prompt, size_beside_prompt
from eagle_plugin.learning.data.sources.responses_api import responses_answer
from eagle_plugin.traffic.frames import Exchange

RESPONSES, GENERATE = "/v1/responses", "/generate"
WHERE = "a recorded answer"
MOST_BESIDE = 256 << 10  # characters of tools and sampling parameters: such as `chat_template_kwargs` they can be any
MEDIA = ("image_data", "video_data", "audio_data", "input_embeds")  # of /generate: what is not text


@dataclass(frozen=True)
class ReadExchange:
    """The requests of a body, and the answers by index of the choice: n of them per request."""

    requests: list[Record]
    answers: dict[int, RecordedAnswer]
    chunks: list[dict[str, Any]]  # the JSON objects of the answer: one, or those of a stream
    n: int = 1
    is_changed: bool = False  # whether the prompt was another one than the request alone gives

    @property
    def is_broken(self) -> bool:
        """Whether an error came in the middle of a stream."""
        return any(chunk.get("error") for chunk in self.chunks)


def read_exchange(exchange: Exchange) -> ReadExchange:
    """What was asked and answered.

    Raises:
        ValueError, RecursionError: a body is not JSON.
        Unusable: it is not a request or an answer that becomes a prompt.
    """
    body = json.loads(exchange.request)
    if not isinstance(body, dict) or body.get("echo"):  # then the answer begins with the prompt
        raise Unusable("request")
    if exchange.route == RESPONSES:
        found = _read_responses(body, _chunks(exchange.answer))
    elif exchange.route == GENERATE:
        found = _read_generate(body, exchange.answer)
    else:
        chunks = _chunks(exchange.answer)
        requests = parse_record(body, "completions", WHERE)  # of chats too: it is how a request is read
        answers = read_answers(exchange.answer.decode() if _is_stream(exchange.answer) else chunks[0])
        found = ReadExchange(requests, answers, chunks, _positive(body.get("n")))
    if not found.answers:
        raise Unusable("answer")
    # Of all requests of a body these are the same.
    if any(size_beside_prompt(one.tools, one.sampling) > MOST_BESIDE for one in found.requests[:1]):
        raise Unusable("tools and sampling parameters")
    return replace(found, is_changed=changes_prompt(body))


def _read_responses(body: dict[str, Any], chunks: list[dict[str, Any]]) -> ReadExchange:
    """A stream ends with an event that has the whole answer."""
    requests = parse_record({"url": RESPONSES, "body": body}, "batch", WHERE)
    last = chunks[-1].get("response", chunks[-1])
    answer = responses_answer(last) if isinstance(last, dict) else None
    return ReadExchange(requests, {0: answer} if answer else {}, chunks)


def _read_generate(body: dict[str, Any], answer: bytes) -> ReadExchange:
    if any(body.get(name) is not None for name in MEDIA):
        raise Unusable("multimodal content")
    given = body.get("sampling_params")
    sampling = given if isinstance(given, dict) else {}
    prompt = body["text"] if body.get("text") is not None else body.get("input_ids")
    requests = parse_record({**sampling, "prompt": prompt}, "completions", WHERE)
    if answer.lstrip().startswith(b"["):
        chunks = json.loads(answer)
        if not all(isinstance(chunk, dict) for chunk in chunks):
            raise Unusable("answer")
        parts = {index: [chunk] for index, chunk in enumerate(chunks)}
    else:
        chunks, parts = _chunks(answer), {}
        for chunk in chunks:
            parts.setdefault(chunk.get("index") or 0, []).append(chunk)
    answers = {index: _generated(own) for index, own in parts.items()}
    return ReadExchange(requests, answers, chunks, _positive(sampling.get("n")))


def _generated(chunks: list[dict[str, Any]]) -> RecordedAnswer:
    """One answer of /generate: each event has the whole text until then, or with a flag of the server, what is new."""
    meta = chunks[-1].get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    reason, ids = meta.get("finish_reason"), chunks[-1].get("output_ids")
    is_whole = len(chunks) == 1 or (isinstance(ids, list) and len(ids) == meta.get("completion_tokens"))
    text = "".join(str(chunk.get("text") or "") for chunk in (chunks[-1:] if is_whole else chunks))
    return RecordedAnswer(text=text, finish=reason.get("type") if isinstance(reason, dict) else None)


def _positive(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1


def _is_stream(answer: bytes) -> bool:
    return not answer.lstrip().startswith(b"{")


def _chunks(answer: bytes) -> list[dict[str, Any]]:
    """The JSON objects of an answer: one, or those of a stream.

    Raises:
        ValueError: a part is not a JSON object.
    """
    chunks = [json.loads(part) for part in (_events(answer) if _is_stream(answer) else [answer])]
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        raise ValueError("no JSON objects")
    return chunks


def _events(answer: bytes) -> Iterator[bytes]:
    for line in answer.replace(b"\r", b"\n").split(b"\n"):
        part = line[len(b"data:") :].strip()
        if line.startswith(b"data:") and part != b"[DONE]":
            yield part


FINISHED = ("stop", "length", "tool_calls", "function_call")


@dataclass
class Outcome:
    """What became of one answer: a line to write, or the reason why there is none."""

    line: bytes | None = None
    dropped: str = ""
    found: int = 0  # values of private data


@dataclass
class _Ids:
    """The token ids that a server sent beside its texts (`return_token_ids` of the request)."""

    prompt: dict[int | None, list[int]] = field(default_factory=dict)  # by choice; None: of the whole answer
    answers: dict[int, list[int]] = field(default_factory=dict)  # by choice


def records_of(exchange: Exchange, private: PrivacyFilter, target: dict[str, str] | None = None) -> Iterator[Outcome]:
    """One result per choice of the answer; nothing of a text that the filter has not seen is in a line.

    target: which one answered: its name and digests; every record says it.
    """
    try:
        read = read_exchange(exchange)
    except (ValueError, RecursionError, Unusable):
        yield Outcome(dropped="unusable")
        return
    with private.remembering() if len(read.answers) > 1 else nullcontext():
        yield from _outcomes(exchange, read, private, {"target": target} if target else {})


def _outcomes(
    exchange: Exchange, read: ReadExchange, private: PrivacyFilter, about: dict[str, Any]
) -> Iterator[Outcome]:
    requests, answers = read.requests, read.answers
    if exchange.domain and private.passes(exchange.domain):
        about["domain"] = exchange.domain
    drafts = (exchange.accepted_drafts or _accepted_drafts(read.chunks)) if len(answers) == 1 else []
    ids = _token_ids(read.chunks)
    for index, answer in sorted(answers.items()):
        number = 0 if len(requests) == 1 else index // read.n
        if read.is_broken or answer.finish not in FINISHED:
            yield Outcome(dropped="aborted")
        elif number >= len(requests):
            yield Outcome(dropped="unusable")
        else:
            prompt_ids = ids.prompt.get(index) or (ids.prompt.get(None) if len(requests) == 1 else None)
            record = replace(requests[number], answer=answer)
            given_ids = prompt_ids, ids.answers.get(index)
            yield _filtered(record, answer, exchange.time, given_ids, private, about, drafts, read.is_changed)


def _filtered(
    record: Record,
    answer: RecordedAnswer,
    time: float,
    given_ids: tuple[list[int] | None, list[int] | None],
    private: PrivacyFilter,
    about: dict[str, Any],
    drafts: list[int],
    needs_ids: bool,
) -> Outcome:
    try:
        prompt = normalise(record, keep_responses=True)
    except Unusable:  # such as images
        return Outcome(dropped="unusable")
    if _says_nothing(prompt):
        return Outcome(dropped="empty")
    result = private.apply(RawPrompt(WHERE, prompt))
    if result.prompt is None:
        undecoded = result.reason == UNDECODED
        return Outcome(dropped="token_ids" if undecoded else "", found=result.found.total())
    ids = None if result.found else _kept_ids(given_ids, private)
    if needs_ids and ids is None:
        return Outcome(dropped="unusable", found=result.found.total())
    written = _record(result.prompt, answer.finish, time, ids, about)
    if drafts:
        written["response"]["accepted_drafts"] = drafts
    line = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
    return Outcome((line + "\n").encode("utf-8", "replace"), found=result.found.total())


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
    record = {"v": RECORDING_VERSION, "id": uuid.uuid4().hex, "time": round(time, 3), "request": request}
    if ids:
        record["prompt_token_ids"], response["token_ids"] = ids
    return record | about | {"response": response}


def _token_ids(chunks: list[dict[str, Any]]) -> _Ids:
    ids = _Ids()
    for chunk in chunks:
        if are_ids(chunk.get("prompt_token_ids")):
            ids.prompt.setdefault(None, chunk["prompt_token_ids"])
        choices = chunk.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else []):
            if not isinstance(choice, dict):
                continue
            index = index_of(choice, position)
            if are_ids(choice.get("prompt_token_ids")):
                ids.prompt.setdefault(index, choice["prompt_token_ids"])
            # SGLang's name in chats, and vLLM's.
            given: Any = choice.get("response_token_ids") or choice.get("token_ids")
            if are_ids(given):
                ids.answers.setdefault(index, []).extend(given)
    return ids


def _accepted_drafts(chunks: list[dict[str, Any]]) -> list[int]:
    """What vLLM tells with `--per-request-spec-decode-metrics`: trees that kept exactly 0, 1, 2, ... drafts."""
    for chunk in reversed(chunks):
        metrics = chunk.get("metrics")
        details = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        found: Any = details.get("acceptance_histogram") if isinstance(details, dict) else None
        if are_ids(found):
            return list(found)
    return []
