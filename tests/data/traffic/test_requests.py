"""Requests of which not everything can be recorded: large fields, many answers, another prompt than the text gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from captured_traffic import answered, chat, exchange

from eagle_plugin.learning.data.privacy.filter import PrivacyFilter
from eagle_plugin.learning.data.privacy.scanner import Scanner

Write = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs"])
def test_a_request_whose_tools_or_parameters_are_too_large_is_dropped(field: str, write: Write) -> None:
    for size, kept in ((200_000, True), (300_000, False)):
        text = "word " * (size // 5)
        tool = {"type": "function", "function": {"name": "find", "description": text}}
        given = {"tools": [tool]} if field == "tools" else {"chat_template_kwargs": {"context": text}}
        write(exchange(chat("Hi", **given), answered("Hello")))
        assert write.writer.counts["records"] == kept and write.writer.counts["dropped:unusable"] == (not kept)


def test_the_prompt_of_many_answers_is_read_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Scanner._read
    monkeypatch.setattr(Scanner, "_read", lambda self, text: read.append(text) or original(self, text))
    records = write(
        exchange(chat("Tell me of Rome", n=20), answered(*(f"Answer {i}" for i in range(20)))), mode="redact"
    )
    assert len(records) == 20 and read.count("Tell me of Rome") == 1
    assert len([text for text in read if text.startswith("Answer")]) == 20
    write(exchange(chat("Tell me of Rome"), answered("Hello")), mode="redact")
    assert read.count("Tell me of Rome") == 2, "nothing is remembered for longer"


CHANGES = [
    {"documents": [{"text": "x"}]},
    {"chat_template": "{{ messages }}"},
    {"truncate_prompt_tokens": 5},
    {"add_special_tokens": True},
]


@pytest.mark.parametrize("changed", CHANGES, ids=lambda one: next(iter(one)))
def test_an_answer_to_another_prompt_than_the_recorded_one_needs_token_ids(
    changed: dict[str, Any], write: Write, filters: Callable[[str], PrivacyFilter], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = answered("Hello", token_ids=[4, 5])
    assert write(exchange(chat("Hi", **changed), answer | {"prompt_token_ids": [1, 2, 3]})) == []
    assert write.writer.counts["dropped:unusable"] == 1
    private = filters("drop")
    monkeypatch.setattr(private, "_tokenizer", SimpleNamespace(decode=lambda ids: "text"))
    (record,) = write(exchange(chat("Hi", **changed), answer | {"prompt_token_ids": [1, 2, 3]}), private=private)
    assert (record["prompt_token_ids"], record["response"]["token_ids"]) == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize("same", [{"documents": None}, {"documents": []}, {"add_special_tokens": False}])
def test_fields_that_change_no_prompt_are_no_reason(same: dict[str, Any], write: Write) -> None:
    assert len(write(exchange(chat("Hi", **same), answered("Hello")))) == 1


def test_a_session_of_sglang_and_added_tokens_of_completions(write: Write) -> None:
    done = {"text": "Hello", "meta_info": {"finish_reason": {"type": "stop"}}}
    for body, route in (({"text": "Hi"}, "/generate"), ({"text": "Hi", "session_params": {"id": "s"}}, "/generate")):
        write(replace(exchange(body, done), route=route))
        assert write.writer.counts["records"] == ("session_params" not in body)
    answer = {"choices": [{"index": 0, "text": "Fine.", "finish_reason": "stop"}]}
    for special, kept in ((True, 1), (False, 0)):
        write(exchange({"prompt": "Hi", "add_special_tokens": special}, answer))
        assert write.writer.counts["records"] == kept
