"""The normal form of prompts: roles and keys, reasons for leaving records out, ids, the split, and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.answers import RecordedAnswer
from eagle_plugin.learning.data.sources.conversation import Unusable, normalise_messages
from eagle_plugin.learning.data.sources.formats import Record
from eagle_plugin.learning.data.sources.prompts import (
    Prompt,
    assign_id_and_split,
    digest,
    format_prompt,
    normalise,
    read_prompts,
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat(*messages: dict[str, Any], keep: bool = False, **more: Any) -> Prompt:
    return normalise(Record("f:1", "chat", messages=list(messages), **more), keep)


def test_sharegpt_turns_become_messages():
    recorded = [("bing", "Welcome"), ("human", "Hi"), ("chatgpt", "Hello"), ("user", "Bye"), ("bard", "Bye!")]
    turns = [{"from": name, "value": text} for name, text in recorded]
    assert normalise_messages(turns, False) == [user("Hi"), assistant("Hello"), user("Bye")]
    assert normalise_messages(turns, True)[-1] == assistant("Bye!")


def test_tool_calls_reasoning_and_parts():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
    }
    turns = [user("Hi"), assistant(None, tool_calls=[call], reasoning="hm", refusal=None), result]
    function = {"name": "f", "arguments": {"a": 1}}
    assert normalise_messages(turns, False) == [
        user("Hi"),
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "x\ny", "tool_call_id": "c1", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "multimodal content"),
        ([user([{"type": "text", "text": "a"}, {"type": "input_audio"}])], "multimodal content"),
        ([user("  ")], "empty turn"),
        ([user(None)], "empty turn"),
        ([user(3)], "malformed message"),
        (["Hi"], "malformed message"),
        ([{"role": "wizard", "content": "Hi"}], "unknown role"),
        ([{"content": "Hi"}], "unknown role"),
        ([assistant("Hello")], "no user turn"),
        ([{"role": "system", "content": "Be brief"}], "no user turn"),
        ([user("Hi"), assistant(None, tool_calls=[{"id": "1"}])], "malformed tool call"),
    ],
)
def test_what_cannot_be_a_prompt_has_a_reason(turns: list[Any], reason: str):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        normalise_messages(turns, False)


def test_recorded_answers_are_kept_on_request():
    answer = RecordedAnswer(message=assistant("Hello"), finish="stop")
    assert chat(user("Hi"), answer=answer).messages == [user("Hi")]
    assert chat(user("Hi"), answer=answer, keep=True).messages == [user("Hi"), assistant("Hello")]
    raw = Record("f:1", "completions", prompt="Once", answer=RecordedAnswer(text="upon", finish="length"))
    assert normalise(raw, True).response == {"text": "upon", "finish": "length"}
    assert normalise(raw, False).response is None


def test_equal_prompts_have_equal_ids_and_different_ones_do_not():
    one, again = chat(user("Café")), chat(user("Cafe\u0301"), sampling={"temperature": 1})
    assert assign_id_and_split(one, 0).id == assign_id_and_split(again, 0).id
    others = [
        chat(user("Cafe")),
        chat({"role": "system", "content": "x"}, user("Café")),
        chat(user("Café"), tools=[{}]),
    ]
    assert len({digest(prompt) for prompt in [one, *others]}) == 4


def test_one_opening_is_on_one_side_of_the_split():
    openings = [f"question {i}" for i in range(400)]
    first = [assign_id_and_split(chat(user(text)), 0.3).split for text in openings]
    longer = [
        assign_id_and_split(chat(user(f" {text.upper()}\n"), assistant("a"), user("more")), 0.3).split
        for text in openings
    ]
    assert first == longer
    assert 80 < first.count("val") < 160
    raw = Record("f:1", "completions", prompt="x")
    assert {assign_id_and_split(normalise(raw, False), 0).split, assign_id_and_split(chat(user("x")), 0).split} == {
        "train"
    }


@given(st.text(), st.lists(st.integers(0, 2**32), min_size=1), st.dictionaries(st.text(), st.integers()))
def test_the_file_gives_back_what_was_written(tmp_path_factory, text: str, ids: list[int], sampling: dict[str, int]):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    prompts = [
        Prompt("a-1", "a", "val", messages=[user(text)], tools=[{"name": text}], sampling=sampling),
        Prompt("a-2", "a", prompt=text, response={"text": text}),
        Prompt("a-3", "a", prompt_ids=ids),
    ]
    path.write_text("".join(map(format_prompt, prompts)), newline="\n", encoding="utf-8")
    assert list(read_prompts(path)) == prompts


def test_half_an_emoji_does_not_break_the_file():
    line = format_prompt(assign_id_and_split(chat(user(json.loads('"cut \\ud83d"'))), 0))
    assert json.loads(line.encode())["messages"] == [user("cut ?")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2 is not JSON"),
        ("[]", "p.jsonl:2 has list, wanted id, source"),
        ('{"id": "1", "source": "a", "prompt": "x", "colour": 1}', "has colour 1: Unexpected keyword argument"),
        ('{"id": "1", "source": "a"}', "has no content, wanted one of messages, prompt, prompt_ids"),
        ('{"id": "1", "source": "a", "prompt": "x", "prompt_ids": [1]}', "has prompt and prompt_ids"),
        (
            '{"id": "1", "source": "a", "prompt_ids": [-1]}',
            "prompt_ids.0 -1: Input should be greater than or equal to 0",
        ),
        (
            '{"id": "1", "source": "a", "messages": [{"content": "x"}]}',
            "messages.0 {'content': 'x'}: a turn needs a role",
        ),
        (
            '{"id": "1", "source": "a", "prompt": "x", "split": "test"}',
            "split 'test': Input should be 'train' or 'val'",
        ),
        ('{"id": 1, "source": "a", "prompt": "x"}', "id 1: Input should be a valid string"),
    ],
)
def test_a_file_of_something_else_is_refused_by_line(line: str, message: str, tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "0", "source": "a", "prompt": "x", "tools": None}) + f"\n{line}\n")
    with pytest.raises(DataError, match=message.replace("[", r"\[")):
        list(read_prompts(path))
    with pytest.raises(DataError, match="nowhere is not a file"):
        list(read_prompts(tmp_path / "nowhere"))
