"""Prompts in their normal form: every format is converted to it, and generation and rendering read it."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from eagle_plugin.common.errors import json_fault
from eagle_plugin.common.json_files import first_fault
from eagle_plugin.learning.data.rows import DataError, Split, TokenIds, open_lines, read_lines
from eagle_plugin.learning.data.sources.answers import FINISHED
from eagle_plugin.learning.data.sources.conversation import Unusable, normalise_messages
from eagle_plugin.learning.data.sources.formats import Record


def _with_role(turn: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(turn.get("role"), str):
        raise ValueError("a turn needs a role")
    return turn


@dataclass(frozen=True)
class Prompt:
    """One conversation, raw text or list of token ids for the target to answer.

    Exactly one of `messages`, `prompt` and `prompt_ids` is given. An assistant turn inside `messages` marks where the
    target answers: generation replaces it by the target's own answer, rendering uses the recorded one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    source: str  # the format, or the user's name for it; evaluation reports its results by source
    split: Split = "train"
    messages: Annotated[list[Annotated[dict[str, Any], AfterValidator(_with_role)]], Field(min_length=1)] | None = None
    prompt: str | None = None  # raw text, used without the chat template
    prompt_ids: TokenIds | None = None  # raw text as ids of the target's tokenizer
    tools: list[Any] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # temperature, max_tokens, ... of the recorded request
    # The recorded answer to `prompt` ("text") or `prompt_ids` ("token_ids" or "text"), and its "finish" reason.
    response: dict[str, Any] | None = None
    finish: str | None = None  # CUT if the recorded answer at the end of `messages` was cut by its token limit
    target: dict[str, str] | None = None  # that gave the recorded answer: name and digests, if the capture says it
    date: str | None = None  # of the recorded answer, as YYYY-MM-DD in UTC: chat templates can write it


_PROMPT = TypeAdapter(Prompt)
_CONTENT = ("messages", "prompt", "prompt_ids")
CUT = "length"  # the reason why an answer ended: its token limit
LIMITED = (CUT, "max_tokens")  # the same in the words of all servers
LONGEST_REASON = 40  # characters
# Levels of lists and objects in a prompt. Far above what tools and messages have, far below what Python can write.
DEEPEST = 100


def read_prompts(path: str | Path) -> Iterator[Prompt]:
    """Yield the prompts of a JSON-lines file that `format_prompt` wrote.

    Raises:
        DataError: naming file, line and field.
    """
    path = Path(path)
    with open_lines(path, "the prompts that `eagle-plugin data prepare` wrote") as file:
        for number, line in read_lines(file, str(path)):
            if line.strip():
                yield parse_prompt(line, f"{path}:{number}")


def parse_prompt(line: bytes, where: str) -> Prompt:
    """The prompt in one line of a file; `where` is for the error.

    Raises:
        DataError: naming the place and the field.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} {json_fault(error)}; write the file again with `eagle-plugin data prepare`"
        ) from error
    advice = "bring the file to the prompt form with `eagle-plugin data prepare`"
    if not isinstance(value, dict):
        raise DataError(f"{where} has {type(value).__name__}, wanted id, source and fields of a prompt; {advice}")
    given = [name for name in _CONTENT if value.get(name) is not None]
    try:
        prompt = _PROMPT.validate_python({name: item for name, item in value.items() if item is not None})
    except ValidationError as error:
        raise DataError(f"{where} has {first_fault(error)}; {advice}") from error
    if len(given) != 1:
        raise DataError(
            f"{where} has {' and '.join(given) or 'no content'}, wanted one of {', '.join(_CONTENT)}; {advice}"
        )
    if wrong := _unstorable(value):
        raise DataError(f"{where} has {wrong}; {advice}")
    return prompt


def _unstorable(value: Any) -> str | None:
    """Why a value cannot be written as JSON, or None: Python also reads NaN, and Parquet has times and bytes."""
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float):
                if not math.isfinite(item):
                    return f"the number {item}, which is not JSON"
            elif not isinstance(item, str | int | None):
                return f"a {type(item).__name__}, which is not JSON"
        if not below:
            return None
        level = below
    return f"more than {DEEPEST} levels of nesting"


def format_prompt(prompt: Prompt) -> str:
    """The prompt as one line of JSON, with its newline. Empty fields are left out; half surrogate pairs become `?`."""
    value = {name: item for name, item in asdict(prompt).items() if item not in (None, {})}
    # Of one that has them; see `has_half_characters`.
    return (_dump(value) + "\n").encode("utf-8", "replace").decode()


def has_half_characters(prompt: Prompt) -> bool:
    """Whether a text has half of a surrogate pair: a recorder cut an emoji in two.

    JSON can hold the half; UTF-8 cannot, and tokenizers refuse it.
    """
    try:
        _dump(asdict(prompt)).encode()
    except UnicodeEncodeError:
        return True
    return False


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def normalise(record: Record, keep_responses: bool) -> Prompt:
    """The record in normal form, without an id and a split (see `assign_id_and_split`).

    Recorded answers are kept only with `keep_responses`: as the last message of a conversation, or as `response` of a
    raw prompt.

    Raises:
        Unusable: with the reason to count.
    """
    prompt = _normal_form(record, keep_responses)
    content = [prompt.messages, prompt.prompt_ids, prompt.tools, prompt.sampling, prompt.response]
    if reason := _unstorable(content):
        raise Unusable(reason)
    return prompt


def _normal_form(record: Record, keep_responses: bool) -> Prompt:
    answer = record.answer if keep_responses else None
    if answer and answer.finish is not None and answer.finish not in FINISHED:
        raise Unusable(f"answer that did not end by itself ({answer.finish[:LONGEST_REASON]})")
    if keep_responses and record.continues:  # a row begins with the first token of the target's own
        raise Unusable("answer that the client began")
    target = record.target if answer else None
    prompt = Prompt("", record.source, tools=record.tools, sampling=record.sampling, target=target)
    prompt = replace(prompt, date=record.date if keep_responses else None)
    if record.messages is not None:
        turns = record.messages
        if answer and answer.message:
            turns = [*turns, {"role": "assistant", **answer.message}]
            prompt = replace(prompt, finish=CUT if answer.finish in LIMITED else None)
        return replace(prompt, messages=normalise_messages(turns, keep_responses))
    response = None
    if answer and (answer.text is not None or answer.token_ids):
        finish = CUT if answer.finish in LIMITED else answer.finish
        response = {"text": answer.text, "token_ids": answer.token_ids, "finish": finish}
        response = {name: item for name, item in response.items() if item is not None}
    if isinstance(record.prompt, str):
        if not record.prompt.strip():
            raise Unusable("empty prompt")
        return replace(prompt, prompt=record.prompt, response=response)
    return replace(prompt, prompt_ids=record.prompt, response=response)


def digest(prompt: Prompt) -> bytes:
    """A digest (16 bytes) of the prompt's content, its tools and its recorded answer; other fields do not change it."""
    content = [prompt.messages, prompt.prompt, prompt.prompt_ids, prompt.tools, prompt.response]
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")).digest()[:16]


def assign_id_and_split(prompt: Prompt, val_share: float) -> Prompt:
    """The prompt with an id from its content, and its split: "val" for about `val_share` of the prompts.

    The split depends only on the first user text, without its case and spacing. So conversations that begin with the
    same text are always in the same split.
    """
    first = prompt.prompt if prompt.prompt is not None else json.dumps(prompt.prompt_ids)
    if prompt.messages is not None:
        first = next((turn.get("content") or "" for turn in prompt.messages if turn["role"] == "user"), "")
    text = " ".join(unicodedata.normalize("NFKC", first).casefold().split())
    point = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
    identifier = f"{prompt.source}-{digest(prompt).hex()[:16]}"
    return replace(prompt, id=identifier, split="val" if point < val_share else "train")
