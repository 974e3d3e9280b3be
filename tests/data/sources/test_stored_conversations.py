"""Conversations as people store them: what is read, and what is counted with the place where it was found first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.learning.data.prepare import main, prepare
from eagle_plugin.learning.data.privacy.filter import PrivacySettings
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.conversation import normalise_messages
from eagle_plugin.learning.data.sources.prompts import Prompt, read_prompts
from eagle_plugin.learning.data.sources.record_files import read_objects

ASKED = {"role": "user", "content": "What time is it?"}
FUNCTION = {"name": "clock", "arguments": "{}"}
CALL = {"type": "function", "function": FUNCTION}
READ = {"type": "function", "function": {"name": "clock", "arguments": {}}}
Write = Callable[..., str]


def kept(file: str, tmp_path: Path, **options: Any) -> tuple[list[Prompt], Any]:
    out = tmp_path / "out.jsonl"
    stats = prepare([file], out, PrivacySettings("off"), **options)
    return list(read_prompts(out)), stats


@pytest.mark.parametrize(
    "stored",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": json.dumps(CALL)},
        {"tool_calls": [json.dumps(CALL)]},
        {"tool_calls": json.dumps([FUNCTION])},
        {"tool_calls": CALL},
        {"function_call": FUNCTION},
        {"function_call": json.dumps(FUNCTION)},
    ],
)
def test_tool_calls_are_read_in_every_form(stored):
    messages = [ASKED, {"role": "assistant", "content": None, **stored}]
    assert normalise_messages(messages, keep_responses=True)[1]["tool_calls"] == [READ]
    turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps([FUNCTION])}]
    assert normalise_messages(turns, keep_responses=True)[1]["tool_calls"] == [READ]


@pytest.mark.parametrize("stored", ["clock()", 7, '"clock"', "[1]", '{"arguments": "{}"}'])
def test_calls_that_cannot_be_read_are_counted(stored, write_lines: Write, tmp_path):
    chats = [{"messages": [ASKED]}, {"messages": [ASKED, {"role": "assistant", "tool_calls": stored}]}]
    _, stats = kept(write_lines(*chats), tmp_path, keep_responses=True)
    assert stats.skipped == {"malformed tool call": 1} and stats.first["malformed tool call"].endswith(":2")


def test_empty_calls_are_none():
    for stored in (None, [], "", "[]", "null", {}):
        turn = normalise_messages([ASKED, {"role": "assistant", "content": "Noon.", "tool_calls": stored}], True)[1]
        assert turn == {"role": "assistant", "content": "Noon."}


def test_tools_are_read_in_every_form(write_lines: Write, tmp_path):
    tool = {"type": "function", "function": {"name": "clock"}}
    forms = [{"tools": [tool]}, {"tools": json.dumps([tool])}, {"functions": [tool["function"]]}]
    chats = [{"messages": [{**ASKED, "content": f"{i}?"}], **form} for i, form in enumerate(forms)]
    prompts, _ = kept(write_lines(*chats), tmp_path)
    assert [prompt.tools for prompt in prompts] == [[tool]] * 3
    bad = {"messages": [ASKED], "tools": "clock()"}
    _, stats = kept(write_lines(*chats, bad), tmp_path)
    assert stats.skipped == {"malformed tools": 1}


def answered(reason: Any, number: int = 0) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Noon."}, "finish_reason": reason}
    return {"messages": [{**ASKED, "content": f"{number}?"}], "choices": [choice]}


def sagemaker(stream: list[dict[str, Any]]) -> dict[str, Any]:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in stream)
    sides = {"endpointInput": {"data": json.dumps({"messages": [ASKED]}), "encoding": "JSON"}}
    return {"captureData": {**sides, "endpointOutput": {"data": text, "encoding": "JSON"}}}


def test_answers_that_did_not_end_are_counted(write_lines: Write, tmp_path):
    reasons = ["stop", "length", "tool_calls", "content_filter", "abort", None, "error"]
    prompts, stats = kept(write_lines(*map(answered, reasons, range(7))), tmp_path, keep_responses=True)
    assert [prompt.finish for prompt in prompts] == [None, "length", None]
    assert stats.skipped == {
        f"answer that did not end by itself ({reason})": 1
        for reason in ("content_filter", "abort", "unfinished", "error")
    }
    assert stats.first["answer that did not end by itself (abort)"].endswith(":5")
    prompts, stats = kept(write_lines(*map(answered, reasons, range(7))), tmp_path)
    assert len(prompts) == 7 and not stats.skipped  # the prompts alone can be used


def test_a_stream_that_was_cut_off_is_counted(write_lines: Write, tmp_path):
    part = {"choices": [{"index": 0, "delta": {"content": "Par"}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {"content": "is"}, "finish_reason": "stop"}]}
    prompts, _ = kept(write_lines(sagemaker([part, end])), tmp_path, keep_responses=True)
    assert prompts[0].messages[-1]["content"] == "Paris"
    with pytest.raises(DataError, match=r"1 answer that did not end by itself \(unfinished\)"):
        kept(write_lines(sagemaker([part])), tmp_path, keep_responses=True)


def test_values_of_no_use_are_counted_and_the_prompt_is_kept(write_lines: Write, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    wrong: list[dict[str, Any]] = [
        *({"temperature": value} for value in ("hot", float("nan"), -3)),
        {"max_tokens": -5, "top_p": 7},
        {"temperature": 0.7, "max_tokens": 5},
    ]
    chats = [{"messages": [{**ASKED, "content": f"{i}?"}], **values} for i, values in enumerate(wrong)]
    chats += [{"messages": [{**ASKED, "content": "half: \ud83d"}]}]
    file, out = write_lines(*chats), tmp_path / "out.jsonl"
    with open(file, "a") as lines:
        lines.write(
            json.dumps({"messages": [ASKED], "tools": ["deep"]}).replace('"deep"', "[" * 1000 + "]" * 1000) + "\n"
        )
    assert main([file, "--out", str(out), "--privacy", "off"]) == 0
    prompts = list(read_prompts(out))
    assert [prompt.sampling for prompt in prompts] == [*[{}] * 4, {"temperature": 0.7, "max_tokens": 5}, {}]
    assert prompts[5].messages[0]["content"] == "half: ?"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().err.splitlines()]
    for row in (
        ["changed: sampling value left out: temperature", "3", "prompts.jsonl:1"],
        ["changed: sampling value left out: max_tokens", "1", "prompts.jsonl:4"],
        ["changed: sampling value left out: top_p", "1", "prompts.jsonl:4"],
        ["changed: half of a character written as ?", "1", "prompts.jsonl:6"],
    ):
        assert row in rows
    (left_out,) = [row for row in rows if row and row[0].startswith("left out:")]
    assert left_out[1:] == ["1", "prompts.jsonl:7"] and "nest" in left_out[0]


def test_the_day_of_an_answer_is_kept(write_lines: Write, tmp_path):
    chat = answered("stop") | {"created": 1738540800}
    (prompt,), _ = kept(write_lines(chat), tmp_path, keep_responses=True)
    assert prompt.date == "2025-02-03"
    (prompt,), _ = kept(write_lines(chat), tmp_path)
    assert prompt.date is None


def test_parquet_has_no_fields_that_a_row_has_not(tmp_path: Path):
    """Parquet gives every structure the fields of all of them, and null where a row has no such field."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [READ]}]},
        {"messages": [ASKED, {"role": "assistant", "content": "Noon.", "name": "a"}], "temperature": 0.5},
    ]
    rows[0]["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": 3}}}]
    rows[1]["messages"][1]["tool_calls"] = [{"function": {"name": "g", "arguments": {"y": "z"}}}]
    path = tmp_path / "chats.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows * 400), path, row_group_size=100)
    counts: list[int] = []
    values = [item.value for item in read_objects(str(path), counts.append)]
    assert sum(counts) == path.stat().st_size and len(counts) > 2 and min(counts) >= 0
    calls = [value["messages"][1]["tool_calls"][0]["function"]["arguments"] for value in values[:2]]
    assert calls == [{"x": 3}, {"y": "z"}] and values[0]["messages"][0] == ASKED
