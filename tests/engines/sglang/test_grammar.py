"""Grammars under speculation: every answer to 80 JSON requests parses and is valid; regex, EBNF, structural tags."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from sampling_requests import ask, post
from serving import accept_length

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

BOOLEAN = {"type": "boolean"}
# Every schema bounds its text: a random model would never close an open string or list by itself.
SCHEMAS = [
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, "lit": BOOLEAN, "kind": {"const": "lamp"}},
        "required": ["colour", "lit", "kind"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "level": {"type": "integer", "minimum": -5, "maximum": 5},
        },
        "required": ["age", "level"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": [0, 1, "x", None]}},
    },
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "note": {"type": "string", "maxLength": 6},
            "more": {"type": "object", "properties": {"ok": BOOLEAN}, "required": ["ok"]},
        },
        "required": ["name", "more"],
        "additionalProperties": False,
    },
    {
        "anyOf": [
            {"type": "object", "properties": {"a": BOOLEAN}, "required": ["a"], "additionalProperties": False},
            {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 2, "maxItems": 2},
        ]
    },
]
# The engine's grammar library skips integers outside the range only for bounded integers; all of these are bounded.
WORDS = ["tree", "the quick brown fox", "a b c", "one two three", "write", "hello", "x = y", "10 20 30"]
REGEX = r"[0-9]{3}-(cat|dog){1,3}[a-f]{2,4}"
EBNF = 'root ::= ("yes" | "no") " " [0-9] [0-9]? ("," root)?'


def prompts(count: int) -> list[str]:
    return [f"{WORDS[i % len(WORDS)]} {i // len(WORDS)}" for i in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_forty_answers_are_valid_json(temperature, plugin):
    """The schemas take turns, with a free request after every five, so that batches are mixed."""
    schemas = [*SCHEMAS, None]
    common = {"temperature": temperature, "max_new_tokens": 160, "ignore_eos": False}
    settings = [common | ({"json_schema": json.dumps(schema)} if schema else {}) for schema in schemas] * 8
    answers = ask(plugin, prompts(len(settings)), settings)
    checked = 0
    for answer, schema in zip(answers, schemas * 8, strict=True):
        if schema is None:
            with pytest.raises(ValueError):  # a free text is no JSON: the model does not write it by itself
                json.loads(answer["text"])
            continue
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer["text"]
        jsonschema.validate(json.loads(answer["text"]), schema)
        checked += 1
    assert checked == 40
    assert len({answer["text"] for answer in answers}) > 10
    constrained = [answer for answer, schema in zip(answers, schemas * 8, strict=True) if schema]
    assert accept_length(constrained) > 1.01, "no draft was accepted under a grammar"


def test_greedy_json_is_that_of_plain_decoding(plugin, plain):
    settings = [
        {"temperature": 0, "max_new_tokens": 120, "ignore_eos": False, "json_schema": json.dumps(schema)}
        for schema in SCHEMAS
    ]
    ours, theirs = (ask(server, prompts(5), settings) for server in (plugin, plain))
    assert [answer["text"] for answer in ours] == [answer["text"] for answer in theirs]


def test_regular_expressions_and_ebnf(plugin):
    common = {"temperature": 0.8, "max_new_tokens": 200, "ignore_eos": False}
    settings = [common | {"regex": REGEX}, common | {"ebnf": EBNF}] * 16
    responses = [answer["text"] for answer in ask(plugin, prompts(32), settings)]
    for text in responses[::2]:
        assert re.fullmatch(REGEX, text), text
    for text in responses[1::2]:
        assert re.fullmatch(r"((yes|no) \d\d?)(,(yes|no) \d\d?)*", text), text
    assert len(set(responses)) > 16


def test_openai_response_formats(plugin):
    schema = SCHEMAS[0]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "json"}],
        "max_tokens": 160,
        "temperature": 0.8,
    }
    form = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema, "strict": True}}
    for _ in range(4):
        choice = post(plugin, "/v1/chat/completions", body | {"response_format": form})["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<lamp>",
            "content": {"type": "regex", "pattern": "(on|off){1,3}[0-9]{2}"},
            "end": "</lamp>",
        },
    }
    text = post(plugin, "/v1/chat/completions", body | {"response_format": tag})["choices"][0]["message"]["content"]
    assert re.fullmatch(r"<lamp>(on|off){1,3}\d\d</lamp>", text), text
