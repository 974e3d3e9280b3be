"""Reads what is on the wire of each captured route: the requests in a body, and the joined answers to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle_plugin.learning.data.sources.answers import RecordedAnswer, read_answers
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.formats import Record, parse_record
from eagle_plugin.learning.data.sources.responses_api import responses_answer
from eagle_plugin.traffic.frames import Exchange

RESPONSES, GENERATE = "/v1/responses", "/generate"
WHERE = "a captured answer"
MEDIA = ("image_data", "video_data", "audio_data", "input_embeds")  # of /generate: what is not text


@dataclass(frozen=True)
class ReadExchange:
    """The requests of a body, and the answers by index of the choice: n of them per request."""

    requests: list[Record]
    answers: dict[int, RecordedAnswer]
    chunks: list[dict[str, Any]]  # the JSON objects of the answer: one, or those of a stream
    n: int = 1

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
    return found


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
