"""What is recorded of /v1/responses and of SGLang's /generate, plain and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from captured_traffic import exchange

from eagle_plugin.traffic.frames import Exchange

Write = Callable[..., list[dict[str, Any]]]
SEARCH = {"type": "function", "name": "find", "parameters": {"type": "object"}}


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def response(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": list(output), "error": None, **more}


def responses(request: dict[str, Any], answer: dict[str, Any], streamed: bool = False) -> Exchange:
    events = [
        {"type": "response.created", "response": response(status="in_progress")},
        {"type": "response.output_text.delta", "delta": "He"},
        {"type": "response.completed", "response": answer},  # so called in vLLM whatever the status is
    ]
    return replace(exchange(request, events if streamed else answer), route="/v1/responses")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_recorded_as_a_chat(streamed: bool, write: Write) -> None:
    asked = {"input": "Hi", "instructions": "Be kind", "max_output_tokens": 9, "metadata": {"who": "x"}}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    (record,) = write(responses(asked, response(thought, message("Hello")), streamed))
    turns = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    assert record["request"] == {"max_tokens": 9, "messages": turns}
    answer = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    assert record["response"] == {"finish_reason": "stop", "text": "Hello", "message": answer}


def test_a_response_that_calls_or_was_cut_says_so(write: Write) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"q": "trees"}'}
    cut = response(message("He"), status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    called, limited = write(
        responses({"input": "Look", "tools": [SEARCH]}, response(call)), responses({"input": "Hi"}, cut, streamed=True)
    )
    (found,) = called["response"]["message"]["tool_calls"]
    assert (found["id"], found["function"]) == ("c1", {"name": "find", "arguments": {"q": "trees"}})
    assert called["response"]["finish_reason"] == "tool_calls" and limited["response"]["finish_reason"] == "length"
    assert called["request"]["tools"][0]["function"]["name"] == "find"


@pytest.mark.parametrize(
    ("request_body", "answer", "reason"),
    [
        ({"input": "Hi", "previous_response_id": "resp_0"}, response(message("A")), "unusable"),
        ({"input": "Hi"}, response(), "unusable"),
        ({"input": "Hi"}, response({"type": "web_search_call"}, message("A")), "unusable"),
        ({"input": "Hi", "background": True}, response(message("A"), status="queued"), "aborted"),
        ({"input": "Hi"}, response(message("A"), status="failed"), "aborted"),
        ({"input": "Hi"}, response(message("A"), status="incomplete",
         incomplete_details={"reason": "content_filter"}), "aborted"),
        ({"input": "Hi"}, response(message("")), "empty"),
    ],
)  # fmt: skip
def test_responses_that_are_not_recorded_are_counted(
    request_body: dict[str, Any], answer: dict[str, Any], reason: str, write: Write
) -> None:
    assert write(responses(request_body, answer)) == []
    assert write.writer.counts[f"dropped:{reason}"] == 1


def test_private_data_in_a_response_is_found(write: Write) -> None:
    private = "anna.berg@firma.de"
    assert write(responses({"input": "Hi"}, response(message(private)), streamed=True)) == []
    assert write(responses({"input": "Hi", "instructions": private}, response(message("A")))) == []
    assert write.writer.counts["filtered"] == 1


def out(text: str, tokens: int, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """What SGLang answers: `output_ids` are as many as the text of this event has tokens."""
    reason = {"type": finish} if finish else None
    meta = {"id": "r", "finish_reason": reason, "completion_tokens": more.pop("all_tokens", tokens)}
    return {"text": text, "output_ids": [7] * tokens, "meta_info": meta, **more}


def generated(request: dict[str, Any], answer: Any) -> Exchange:
    if isinstance(answer, dict) or "index" in request or request.get("stream"):
        return replace(exchange(request, answer), route="/generate")
    return Exchange(0.0, json.dumps(request).encode(), json.dumps(answer).encode(), "/generate")


def test_generate_is_recorded_as_a_completion(write: Write) -> None:
    asked = {"text": "Once", "sampling_params": {"temperature": 0.5, "max_new_tokens": 3, "custom": 1}}
    whole = [out(" upon", 1), out(" upon a", 2), out(" upon a time", 3, "length")]
    parts = [out(" upon", 1), out(" a", 1, all_tokens=2), out(" time", 1, "length", all_tokens=3)]
    streams = asked | {"stream": True}
    plain, streamed, incremental = write(
        generated(asked, whole[-1]), generated(streams, whole), generated(streams, parts)
    )
    assert plain["request"] == {"temperature": 0.5, "max_tokens": 3, "prompt": "Once"}
    assert plain["response"] == {"finish_reason": "length", "text": " upon a time"}
    assert streamed["response"] == incremental["response"] == plain["response"]


def test_generate_with_several_prompts_gives_a_record_each(write: Write) -> None:
    asked = {"text": ["A", "B"], "sampling_params": {"n": 2}}
    records = write(generated(asked, [out(str(number), 1, "stop") for number in range(4)]))
    assert [(one["request"]["prompt"], one["response"]["text"]) for one in records] == [
        ("A", "0"), ("A", "1"), ("B", "2"), ("B", "3")
    ]  # fmt: skip
    events = [out("C", 1, index=1), out("D", 1, "stop", index=0), out("CE", 2, "stop", index=1)]
    *_, first, second = write(generated({"text": ["A", "B"], "stream": True}, events))
    assert [(one["request"]["prompt"], one["response"]["text"]) for one in (first, second)] == [("A", "D"), ("B", "CE")]


@pytest.mark.parametrize(
    ("request_body", "answer", "reason"),
    [
        ({"text": "A", "image_data": "x"}, out("B", 1, "stop"), "unusable"),
        ({"text": "A"}, out("B", 1, "abort"), "aborted"),
        ({"text": "A"}, out("", 0, "stop"), "empty"),
        ({"input_ids": [5, 6]}, out("B", 1, "stop"), "token_ids"),
        ({"sampling_params": {}}, out("B", 1, "stop"), "unusable"),
    ],
)
def test_generated_text_that_is_not_recorded_is_counted(
    request_body: dict[str, Any], answer: dict[str, Any], reason: str, write: Write
) -> None:
    assert write(generated(request_body, answer)) == []
    assert write.writer.counts[f"dropped:{reason}"] == 1
