"""The formats of prompt files: detects the format and reads the request and the recorded answer of each record."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_plugin.learning.data.rows import DataError, are_ids
from eagle_plugin.learning.data.sources.answers import UNFINISHED, RecordedAnswer, read_answers
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.record_files import LocatedObject, SkippedRecord, read_objects
from eagle_plugin.learning.data.sources.request_fields import (
    changes_prompt,
    continues_answer,
    read_date,
    read_sampling,
    read_tools,
)
from eagle_plugin.learning.data.sources.responses_api import responses_messages, responses_tools

FORMATS = {
    "sharegpt": "ShareGPT",
    "chat": "OpenAI chat",
    "batch": "OpenAI batch",
    "completions": "OpenAI completions",
    "sagemaker": "SageMaker data capture",
    "capture": "capture of this plugin",
}
DETECTION_RECORDS = 20
RECORDING_VERSION = 1
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Record:
    """One recorded request and its answer; `messages` are as recorded, see `normalise_messages`."""

    where: str
    source: str
    messages: list[Any] | None = None
    prompt: str | list[int] | None = None
    tools: list[Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    answer: RecordedAnswer | None = None
    prompt_ids: list[int] | None = None  # of the rendered prompt, if they were recorded
    target: dict[str, str] | None = None  # that gave the answer: name and digests, in traffic that this plugin recorded
    date: str | None = None  # on which the request was answered, as YYYY-MM-DD in UTC, if it was recorded
    continues: bool = False  # whether the client gave the beginning of the answer, as the last message
    changes: tuple[str, ...] = ()  # what was left out of the request, for the counts of the command


def name_format(value: dict[str, Any]) -> str | None:
    """The format of one record: a key of `FORMATS`, "unknown", or None if it fits several (an empty chat)."""
    if "captureData" in value:
        return "sagemaker"
    if "v" in value and "request" in value:
        return "capture"
    if "custom_id" in value and "body" in value:
        return "batch"
    for key in ("conversations", "messages"):
        turns = value.get(key)
        if turns == []:
            return None
        if isinstance(turns, list) and isinstance(turns[0], dict):
            if "from" in turns[0]:
                return "sharegpt"
            if "role" in turns[0]:
                return "chat"
    return "completions" if "prompt" in value else UNKNOWN


def read_records(
    path: str, on_bytes: Callable[[int], None] | None = None, skip_broken: bool = False
) -> Iterator[Record | SkippedRecord]:
    """Yield the records of one file; the format is detected from its first 20 records, which must agree.

    Args:
        path: JSON lines (plain, gzip or zstandard), a JSON array, Parquet, or "-" for stdin.
        on_bytes: see `read_objects`.
        skip_broken: leave out what `read_objects` would refuse, and records of unknown format, each counted.

    Raises:
        DataError: naming file and line, for broken files, unknown formats and files of several formats.
    """
    objects = read_objects(path, on_bytes, skip_broken)
    first: list[LocatedObject | SkippedRecord] = []
    votes: Counter[str] = Counter()
    while votes.total() < DETECTION_RECORDS and (item := next(objects, None)) is not None:
        first.append(item)
        name = name_format(item.value) if isinstance(item, LocatedObject) else None
        votes.update([name] if name else [])
    if skip_broken and len(votes) > 1:
        del votes[UNKNOWN]
    known = _agreed_format(votes, "<stdin>" if path == "-" else path)
    for item in itertools.chain(first, objects):
        if isinstance(item, SkippedRecord):
            yield item
            continue
        name = name_format(item.value)
        if skip_broken and name == UNKNOWN:
            yield SkippedRecord(item.where, "unknown format")
            continue
        if name not in (known, None):
            raise DataError(
                f"{item.where} is {_title(name)}, but the file began as {_title(known)}; split it by format"
            )
        try:
            records = parse_record(item.value, known, item.where) if name else []
            yield from records
            if not records:
                yield SkippedRecord(item.where, "empty conversation")
        except Unusable as reason:
            yield SkippedRecord(item.where, str(reason))


def _agreed_format(votes: Counter[str], name: str) -> str:
    if len(votes) == 1 and UNKNOWN not in votes:
        return next(iter(votes))
    counts = ", ".join(f"{count} {_title(found)}" for found, count in votes.most_common()) or "no record"
    raise DataError(
        f"{name} begins with {counts}; wanted one format per file, of: {', '.join(FORMATS.values())} "
        "(see `eagle-plugin data prepare --help`)"
    )


def _title(name: str | None) -> str:
    return FORMATS.get(name or "", "of unknown format")


def parse_record(value: dict[str, Any], known: str, where: str) -> list[Record]:
    """The requests in one record: one, or several if a completions request has a list of prompts.

    Raises:
        Unusable: with the reason to count.
    """
    if known == "sharegpt" or (known == "chat" and "conversations" in value):
        records = [_parse_sharegpt(value, where)]
    elif known == "batch" and str(value.get("url")).endswith("/responses"):
        records = [_parse_responses(value["body"], where)]
    elif known == "batch":
        records = _parse_request(value["body"], where)
    elif known == "sagemaker":
        records = _parse_sagemaker(value["captureData"], where)
    elif known == "capture":
        records = _parse_recording(value, where)
    else:
        records = _parse_request(value, where)
    return [replace(record, source=known) for record in records]


def _parse_sharegpt(value: dict[str, Any], where: str) -> Record:
    turns = value["conversations"] if "conversations" in value else value["messages"]
    if isinstance(value.get("system"), str) and value["system"]:
        turns = [{"role": "system", "content": value["system"]}, *turns]
    return Record(where, "", messages=turns, tools=read_tools(value), date=read_date(value))


def _parse_request(body: Any, where: str) -> list[Record]:
    """The body of a chat, completions or TGI request, with the answer if the same object has it."""
    if not isinstance(body, dict):
        raise Unusable("malformed request")
    sampling, changes = read_sampling(body)
    base = Record(where, "", tools=read_tools(body), sampling=sampling, changes=changes, date=read_date(body))
    answers = read_answers(body)
    if answers and changes_prompt(body):
        answers, base = {}, replace(base, changes=(*changes, "answer to a changed prompt left out"))
    if isinstance(body.get("messages"), list):
        return [replace(base, messages=body["messages"], answer=answers.get(0), continues=continues_answer(body))]
    given = body.get("prompt", body.get("inputs"))
    if "prompt" not in body:
        sampling, changes = read_sampling(body.get("parameters"))
        base = replace(base, sampling=sampling, changes=changes)
    if isinstance(body.get("completion"), str):
        answers = {0: RecordedAnswer(text=body["completion"])}
    if isinstance(given, list) and given and isinstance(given[0], dict) and "role" in given[0]:
        return [replace(base, messages=given, answer=answers.get(0), continues=continues_answer(body))]
    prompts = given if isinstance(given, list) and not are_ids(given) else [given]
    if not prompts or not all(isinstance(prompt, str) or are_ids(prompt) for prompt in prompts):
        raise Unusable("no prompt in the request")
    return _with_answers([replace(base, prompt=prompt) for prompt in prompts], answers, body)


def _with_answers(records: list[Record], answers: dict[int, RecordedAnswer], body: dict[str, Any]) -> list[Record]:
    """The records with the first answer to each: a request for n answers per prompt has n choices per prompt."""
    if changes_prompt(body):
        return records
    n = body.get("n")
    n = n if type(n) is int and n > 0 else 1
    return [replace(record, answer=answers.get(i * n, record.answer)) for i, record in enumerate(records)]


def _parse_responses(body: Any, where: str) -> Record:
    """The body of a request to /v1/responses."""
    if not isinstance(body, dict):
        raise Unusable("malformed request")
    effort = body["reasoning"].get("effort") if isinstance(body.get("reasoning"), dict) else None
    # Of another form than in chats.
    sampling, changes = read_sampling({**body, "reasoning_effort": effort, "tool_choice": None})
    tools = responses_tools(read_tools(body))
    return Record(where, "", messages=responses_messages(body), tools=tools, sampling=sampling, changes=changes)


def _parse_sagemaker(capture: Any, where: str) -> list[Record]:
    sent, answered = (
        capture.get(key) if isinstance(capture, dict) else None for key in ("endpointInput", "endpointOutput")
    )
    body = _captured_body(sent)
    if isinstance(body, str):
        raise Unusable("captured request is not JSON")
    records = _parse_request(body, where)
    answers = read_answers(_captured_body(answered))
    return _with_answers(records, answers, body)


def _captured_body(side: Any) -> Any:
    """The body of one side of a capture: the JSON value, its text if it is not JSON, None if it was not recorded."""
    data = side.get("data") if isinstance(side, dict) else None
    if not isinstance(data, str):
        return data
    if str(side.get("encoding")).upper() == "BASE64":
        try:
            data = base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise Unusable("undecodable capture") from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def _parse_recording(value: dict[str, Any], where: str) -> list[Record]:
    if value["v"] != RECORDING_VERSION:
        raise DataError(f"{where} is a capture of version {value['v']!r}, wanted {RECORDING_VERSION}; capture it again")
    records = _parse_request(value["request"], where)
    response = value.get("response")
    if len(records) > 1:
        return _with_answers(records, read_answers(response), value["request"])
    if not isinstance(response, dict):
        return records
    text, ids = response.get("text"), response.get("token_ids")
    answer = RecordedAnswer(
        text=text if isinstance(text, str) else None,
        token_ids=ids if are_ids(ids) else None,
        finish=str(response.get("finish_reason", "recorded") or UNFINISHED),
    )
    if answer.text is not None and records[0].messages is not None:
        message = response.get("message")
        if not isinstance(message, dict):
            message = {"role": "assistant", "content": answer.text}
        answer = replace(answer, message=message)
    prompt_ids, target = value.get("prompt_token_ids"), value.get("target")
    return [
        replace(
            records[0],
            answer=answer,
            prompt_ids=prompt_ids if are_ids(prompt_ids) else None,
            target=target if _is_target(target) else None,
            date=read_date(value),
        )
    ]


def _is_target(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(one, str) for one in value.values())
