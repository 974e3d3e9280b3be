"""What is on the disk of an exchange: the joined answer, and nothing private."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captured_traffic import answered, chat, delta, exchange
from private_values import VALUES, known_types, sentence

from eagle_plugin.learning.data.prepare import main as prepare
from eagle_plugin.learning.data.privacy.filter import PrivacyFilter, PrivacySettings
from eagle_plugin.traffic.frames import Exchange

Write = Callable[..., list[dict[str, Any]]]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def message(record: dict[str, Any]) -> dict[str, Any]:
    return record["response"]["message"]


def planted(place: str, text: str) -> Exchange:
    """An exchange with this text in one place of the request or the answer."""
    if place == "question":
        return exchange(chat(text), answered("Fine."))
    if place == "history":
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
        return exchange({"messages": [*turns, {"role": "user", "content": "And now?"}]}, answered("Fine."))
    if place == "tools":
        tool = {"type": "function", "function": {"name": "find", "description": text}}
        return exchange(chat("Hi", tools=[tool]), answered("Fine."))
    if place == "stream":  # cut in the middle of the value
        cut = len(text) - 12
        return exchange(chat("Hi"), [delta(content=text[:cut]), delta(content=text[cut:]), delta(finish="stop")])
    if place == "arguments":
        call = {"index": 0, "id": "call_1", "function": {"name": "find", "arguments": json.dumps({"text": text})}}
        return exchange(chat("Hi", tools=[TOOL]), [delta(tool_calls=[call]), delta(finish="tool_calls")])
    if place == "stop":
        return exchange(chat("Hi", stop=[text]), answered("Fine."))
    assert place == "prompt"
    body = {"choices": [{"index": 0, "text": "Fine.", "finish_reason": "stop"}]}
    return exchange({"model": "m", "prompt": text}, body)


PLACES = ("question", "history", "tools", "stream", "arguments", "stop", "prompt")


def leaked(records: list[dict[str, Any]], folder: Path) -> set[str]:
    """The types of planted values that are in any file of the folder, also in JSON's writing."""
    on_disk = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    texts = on_disk + "\n" + "\n".join(strings(records))
    return {type for type, _, value in VALUES if value in texts}


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in strings(item)]


@pytest.mark.parametrize("mode", ["drop", "redact"])
def test_no_private_data_of_any_kind_is_on_the_disk(mode: str, write: Write, tmp_path: Path) -> None:
    """The kinds are planted in all places in turn."""
    assert {type for type, *_ in VALUES} == known_types()
    places = itertools.cycle(PLACES)
    sent = [planted(place, sentence(before, value)) for place, (_, before, value) in zip(places, VALUES, strict=False)]
    records = write(*sent, exchange(chat("Hello"), answered("Hi")), mode=mode)
    counts = write.writer.counts
    assert counts["filtered"] == len(sent)
    assert len(records) == counts["records"] == (1 if mode == "drop" else len(VALUES) + 1)
    assert message(records[-1])["content"] == "Hi"
    assert leaked(records, tmp_path / mode) == set()


def test_without_the_filter_the_same_traffic_is_on_the_disk(write: Write, tmp_path: Path) -> None:
    """The control of the test above; no setting of a server switches the filter off."""
    sent = [planted(place, sentence(before, value)) for _, before, value in VALUES for place in PLACES]
    records = write(*sent, mode="off", private=PrivacyFilter(PrivacySettings("off")))
    assert len(records) == len(sent)
    assert leaked(records, tmp_path / "off") == known_types()


def test_fields_that_no_training_needs_are_not_written(write: Write) -> None:
    (record,) = write(exchange(chat("Hi", metadata={"who": "x"}, temperature=0.5), answered("Hello")))
    assert record["request"] == {"temperature": 0.5, "messages": [{"role": "user", "content": "Hi"}]}
    assert set(record) == {"v", "id", "time", "request", "response"} and len(record["id"]) == 32
    assert record["response"] == {
        "finish_reason": "stop",
        "text": "Hello",
        "message": {"role": "assistant", "content": "Hello"},
    }


def test_a_stream_is_joined(write: Write) -> None:
    """Of two choices with their events in turn; U+2028 ends a line for Python, and not for JSON."""
    events = [
        delta(0, role="assistant", content=""),
        delta(1, role="assistant", content=""),
        delta(0, content="A\u2028"),
        delta(1, content="C"),
        delta(0, content="B\x85!"),
        delta(1, finish="length", content="D"),
        delta(0, finish="stop"),
        {"choices": [], "usage": {"completion_tokens": 5}},
    ]
    records = write(exchange(chat("Hi", n=2, stream=True), events))
    assert [message(record)["content"] for record in records] == ["A\u2028B\x85!", "CD"]
    assert [record["response"]["finish_reason"] for record in records] == ["stop", "length"]


def test_tool_calls_and_turns_are_kept(write: Write) -> None:
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"q": '}}
    rest = {"index": 0, "function": {"arguments": '"trees"}'}}
    other = {"index": 1, "id": "call_2", "function": {"name": "find", "arguments": "{}"}}
    events = [
        delta(tool_calls=[first]),
        delta(tool_calls=[rest]),
        delta(tool_calls=[other]),
        delta(finish="tool_calls"),
    ]
    called = {"id": "call_0", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    turns = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_0", "content": "2"},
    ]
    (record,) = write(exchange({"messages": turns, "tools": [TOOL]}, events))
    assert [turn["role"] for turn in record["request"]["messages"]] == [turn["role"] for turn in turns]
    assert record["request"]["tools"] == [TOOL]
    assert [(one["id"], one["function"]["arguments"]) for one in message(record)["tool_calls"]] == [
        ("call_1", {"q": "trees"}),
        ("call_2", {}),
    ]


@pytest.mark.parametrize(
    ("request_body", "answer", "reason"),
    [
        (chat("Hi"), [delta(content="A")], "aborted"),
        (chat("Hi"), [delta(content="A"), {"error": {"message": "no"}}, delta(finish="stop")], "aborted"),
        (chat("Hi"), {"choices": [{"message": {"content": "A"}, "finish_reason": "abort"}]}, "aborted"),
        (chat("Hi"), answered(""), "empty"),
        (chat("Hi"), {"object": "list"}, "unusable"),
        ({"prompt": "A", "echo": True}, {"choices": [{"text": "AB", "finish_reason": "stop"}]}, "unusable"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, answered("A"), "unusable"),
        ({"prompt": [5, 6]}, {"choices": [{"text": "A", "finish_reason": "stop"}]}, "token_ids"),
    ],
)
def test_what_is_not_recorded_is_counted(request_body: Any, answer: Any, reason: str, write: Write) -> None:
    assert write(exchange(request_body, answer)) == []
    assert write.writer.counts == {f"dropped:{reason}": 1, "filtered": 0, "removed_segments": 0}


def test_bytes_that_are_no_json_are_counted(write: Write) -> None:
    broken = exchange(chat("Hi"), answered("A"))
    assert write(Exchange(0.0, broken.request, b"data: {"), Exchange(0.0, b"{", broken.answer)) == []
    assert write.writer.counts["dropped:unusable"] == 2


def test_prompts_of_one_request_are_records_of_their_own(write: Write) -> None:
    choices = [{"index": i, "text": f"{i}", "finish_reason": "stop"} for i in range(4)]
    records = write(exchange({"prompt": ["A", "B"], "n": 2}, {"choices": choices}))
    assert [(one["request"]["prompt"], one["response"]["text"]) for one in records] == [
        ("A", "0"), ("A", "1"), ("B", "2"), ("B", "3")
    ]  # fmt: skip


def test_token_ids_are_kept_where_they_can_be_filtered(write: Write, filters: Any) -> None:
    """With a tokenizer, if what they decode to is harmless: a server can hide a part of it."""

    def written(decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
        private = PrivacyFilter(PrivacySettings("drop"))
        private._tokenizer = decode and SimpleNamespace(decode=decode)
        body = answered("Hello", token_ids=[7, 8]) | {"prompt_token_ids": [1, 2, 3]}
        *_, record = write(exchange(chat("Hi"), body), private=private)
        return record

    def hidden(ids: list[int]) -> str:
        return "<think>anna.berg@firma.de</think>Hello" if ids[0] == 7 else "Hi"

    for decode in (None, hidden):
        assert "prompt_token_ids" not in (record := written(decode)) and "token_ids" not in record["response"]
    record = written(lambda ids: "Hi")
    assert record["prompt_token_ids"] == [1, 2, 3] and record["response"]["token_ids"] == [7, 8]


def test_token_ids_of_a_chat_have_other_names_in_sglang(write: Write) -> None:
    private = PrivacyFilter(PrivacySettings("drop"))
    private._tokenizer = SimpleNamespace(decode=str)
    body = answered("Hello", prompt_token_ids=[1, 2, 3], response_token_ids=[7, 8])
    (record,) = write(exchange(chat("Hi"), body), private=private)
    assert record["prompt_token_ids"] == [1, 2, 3] and record["response"]["token_ids"] == [7, 8]


@pytest.mark.parametrize("field", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_an_answer_that_the_client_began_is_counted(field: dict[str, bool], write: Write) -> None:
    """As a turn of its own it would be rendered after an end that the target did not write."""
    body = chat("Hi")
    body["messages"].append({"role": "assistant", "content": "Sure, "})
    assert write(exchange(body | field, answered("here it is"))) == []
    assert write.writer.counts["dropped:unusable"] == 1


def test_token_ids_of_a_stream_are_joined(write: Write) -> None:
    events = [{"prompt_token_ids": [1, 2], **delta(content="A")}, delta(content="B"), delta(finish="stop")]
    for event, ids in zip(events, ([3], [4, 5], None), strict=True):
        event["choices"][0]["token_ids"] = ids
    private = PrivacyFilter(PrivacySettings("drop"))
    private._tokenizer = SimpleNamespace(decode=str)
    (record,) = write(exchange(chat("Hi"), events), private=private)
    assert record["prompt_token_ids"] == [1, 2] and record["response"]["token_ids"] == [3, 4, 5]


def test_data_prepare_reads_it(write: Write, tmp_path: Path) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "find", "arguments": '{"q": 1}'}}
    write(
        exchange(chat("Hi", max_completion_tokens=9), answered("Hello", "Hey")),
        exchange(chat("Look"), [delta(tool_calls=[call]), delta(finish="tool_calls")]),
        exchange({"prompt": "Once"}, {"choices": [{"text": " upon", "finish_reason": "length"}]}),
    )
    files = [str(path) for path in (tmp_path / "drop").glob("*.jsonl")]
    assert prepare([*files, "--out", str(tmp_path / "out"), "--keep-responses", "--workers", "1"]) == 0
    prompts = [json.loads(line) for line in (tmp_path / "out").open()]
    assert [one["messages"][-1].get("content") for one in prompts[:2]] == ["Hello", "Hey"]
    assert prompts[0]["sampling"] == {"max_tokens": 9} and prompts[0]["source"] == "capture"
    assert prompts[2]["messages"][-1]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": 1}}
    assert (prompts[3]["prompt"], prompts[3]["response"]) == ("Once", {"text": " upon", "finish": "length"})


def test_a_defect_drops_one_answer_and_no_text_is_printed(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    private = PrivacyFilter(PrivacySettings("drop"))

    def fail(text: str) -> None:
        raise RuntimeError(text)

    private._scanner.read = fail
    assert write(exchange(chat("my secret text"), answered("A")), private=private) == []
    assert write.writer.counts["dropped:failed"] == 1
    printed = capfd.readouterr()
    assert "RuntimeError" in printed.err and "secret text" not in printed.err + printed.out


def test_the_domain_and_the_rounds_are_written(write: Write) -> None:
    """A domain that is private data is not; a server can tell the rounds beside the answer or in it."""
    sent = exchange(chat("Hi"), answered("Hello"))
    histogram = {"speculative_decoding": {"acceptance_histogram": [4, 2]}}
    of_vllm = exchange(chat("A"), answered("Hello") | {"metrics": histogram})
    streamed = exchange(chat("B"), [delta(content="A"), {**delta(finish="stop"), "metrics": histogram}])
    *records, plain = write(
        replace(sent, domain="code", accepted_drafts=[3, 1]),
        replace(of_vllm, domain="4111111111111111"),
        streamed,
        replace(exchange(chat("Hi", n=2), answered("C", "D")), accepted_drafts=[1]),
    )
    assert [record.get("domain") for record in records] == ["code", None, None, None]
    assert [record["response"].get("accepted_drafts") for record in records] == [[3, 1], [4, 2], [4, 2], None]
    assert "domain" not in plain and "accepted_drafts" not in plain["response"]
