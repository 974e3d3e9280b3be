"""One record of every format: requests, recorded answers, streams; errors of files with several formats."""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.formats import Record, name_format, parse_record, read_records
from eagle_plugin.learning.data.sources.prompts import assign_id_and_split, format_prompt, normalise, parse_prompt
from eagle_plugin.learning.data.sources.record_files import SkippedRecord

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ANSWERED = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
}


def capture(body: Any, answer: str | None = None, encoding: str = "JSON") -> dict[str, Any]:
    """A SageMaker capture of a request body and the text of its answer."""

    def side(mode: str, text: str) -> dict[str, str]:
        data = base64.b64encode(text.encode()).decode() if encoding == "BASE64" else text
        return {"observedContentType": "application/json", "mode": mode, "data": data, "encoding": encoding}

    sides = {"endpointInput": side("INPUT", json.dumps(body))}
    if answer is not None:
        sides["endpointOutput"] = side("OUTPUT", answer)
    return {"captureData": sides, "eventMetadata": {"eventId": "1"}, "eventVersion": "0"}


EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"
TGI = {"inputs": "Once", "parameters": {"max_new_tokens": 9}}
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "sharegpt": ("sharegpt", {"id": "q", "conversations": [{"from": "human", "value": "Hi"}]}),
    "chat": ("chat", CHAT),
    "chat in conversations": ("chat", {"conversations": CHAT["messages"]}),
    "batch": ("batch", {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}),
    "completions": ("completions", {"prompt": "Once", "completion": "upon"}),
    "completions of ids": ("completions", {"prompt": [1, 2, 3]}),
    "sagemaker": ("sagemaker", capture(CHAT, json.dumps(ANSWERED))),
    "sagemaker base64": ("sagemaker", capture(CHAT, json.dumps(ANSWERED), "BASE64")),
    "sagemaker input only": ("sagemaker", capture(CHAT)),
    "sagemaker stream": ("sagemaker", capture(CHAT, STREAM)),
    "sagemaker text generation": ("sagemaker", capture(TGI, '[{"generated_text": "upon"}]')),
    "capture": ("capture", {"v": 1, "id": "1", "request": CHAT, "response": {"text": "Hello", "token_ids": [7]}}),
}


def read(path: str) -> list[Record]:
    records = list(read_records(path))
    assert all(isinstance(record, Record) for record in records)
    return records  # type: ignore[return-value]


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_each_format_is_told_and_its_request_read(line: tuple[str, dict[str, Any]], write_lines: Callable[..., str]):
    name, value = line
    assert name_format(value) == name
    (record,) = read(write_lines(value))
    assert record.source == name
    if record.messages is not None:
        assert record.messages[0].get("content", record.messages[0].get("value")) == "Hi"
    else:
        assert record.prompt in ("Once", [1, 2, 3])


@pytest.mark.parametrize("name", ["sagemaker", "sagemaker base64", "sagemaker stream", "capture"])
def test_the_recorded_answer_is_read(name: str, write_lines: Callable[..., str]):
    (record,) = read(write_lines(LINES[name][1]))
    assert record.answer and record.answer.message and record.answer.message["content"] == "Hello"


def test_a_stream_of_tool_calls_is_joined(write_lines: Callable[..., str]):
    pieces = [
        {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    stream = "\n".join(json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}) for piece in pieces)
    (record,) = read(write_lines(capture(CHAT, stream)))
    assert record.answer and record.answer.message
    assert record.answer.message["tool_calls"] == [{"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}]


@pytest.mark.parametrize("field", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_of_an_answer_that_the_client_began_the_prompt_is_kept(field: dict[str, bool], write_lines: Callable[..., str]):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}]
    choices = [{"message": {"role": "assistant", "content": "here it is"}, "finish_reason": "stop"}]
    for body in ({"messages": turns}, {"messages": turns, "choices": choices}, {"prompt": turns}):
        (record,) = read_records(write_lines(body | field))
        assert normalise(record, False).messages == turns[:1]
        with pytest.raises(Unusable, match="answer that the client began"):
            normalise(record, True)


@pytest.mark.parametrize("field", [{"documents": ["x"]}, {"add_special_tokens": True}, {"documents": []}])
def test_an_answer_to_another_prompt_is_left_out(field: dict[str, Any], write_lines: Callable[..., str]):
    choices = [{"message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}]
    request = {"messages": [{"role": "user", "content": "Hi"}]} | field
    for line in (request | {"choices": choices}, capture(request, json.dumps({"choices": choices}))):
        (record,) = read(write_lines(line))
        assert record.messages == request["messages"] and (record.answer is None) == any(field.values())


def test_text_generation_and_lists_of_prompts(write_lines: Callable[..., str]):
    (record,) = read(write_lines(LINES["sagemaker text generation"][1]))
    assert (record.prompt, record.sampling, record.answer and record.answer.text) == ("Once", {"max_tokens": 9}, "upon")
    both = {"prompt": ["a", "b"], "choices": [{"index": 1, "text": "B"}, {"index": 0, "text": "A"}]}
    assert [(r.prompt, r.answer and r.answer.text) for r in read(write_lines(both))] == [("a", "A"), ("b", "B")]
    assert [r.prompt for r in read(write_lines({"prompt": [[1], [2, 3]]}))] == [[1], [2, 3]]


def answers(path: str) -> list[tuple[Any, str | None]]:
    return [(record.prompt, record.answer.text if record.answer else None) for record in read(path)]


def tgi_stream(*pieces: tuple[str, dict[str, Any]], **last: Any) -> str:
    """The events of a streamed answer of TGI or LMI; `last` is added to the last one."""
    events = [{"index": i, "token": {"id": i, "text": text, **more}} for i, (text, more) in enumerate(pieces)]
    events[-1] |= last
    return "".join(f"data:{json.dumps(event)}\n\n" for event in events)


END = {"details": {"finish_reason": "eos_token"}}


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (tgi_stream(("up", {"special": False}), ("on", {"special": False}), ("</s>", {"special": True}),
                    generated_text="upon", **END), "upon"),
        (tgi_stream(("up", {"special": False}), ("</s>", {"special": True})), "up"),  # cut before the last event
        (tgi_stream(("up", {}), ("on", {}), ("<|im_end|>", {"special_token": True}), **END), "upon"),
        (tgi_stream(("up", {}), ("on", {}), ("</s>", {}), **END), "upon"),
        (tgi_stream(("a", {}), ("<b>", {}), details={"finish_reason": "length"}), "a<b>"),
        (tgi_stream(("a", {}), (" b", {}), **END), "a b"),
    ],
)  # fmt: skip
def test_the_stop_token_is_no_part_of_a_streamed_answer(stream: str, text: str, write_lines: Callable[..., str]):
    assert answers(write_lines(capture(TGI, stream))) == [("Once", text)]


@pytest.mark.parametrize(
    ("body", "answer", "texts"),
    [
        ({"inputs": ["a", "b"]}, [{"generated_text": "A"}, {"generated_text": "B"}], ["A", "B"]),
        ({"inputs": ["a", "b"]}, [[{"generated_text": "A"}], [{"generated_text": "B"}]], ["A", "B"]),
        ({"inputs": ["a", "b"]}, [{"error": "?"}, {"generated_text": "B"}], [None, "B"]),
        ({"prompt": ["a", "b"], "n": 2}, {"choices": [{"index": i, "text": text} for i, text in enumerate("AaBb")]},
         ["A", "B"]),
    ],
)  # fmt: skip
def test_each_of_several_inputs_has_its_own_answer(
    body: Any, answer: Any, texts: list[str | None], write_lines: Callable[..., str]
):
    assert answers(write_lines(capture(body, json.dumps(answer)))) == list(zip("ab", texts, strict=True))


def test_a_capture_of_this_plugin_with_several_prompts(write_lines: Callable[..., str]):
    response = {"choices": [{"index": 0, "text": "A"}, {"index": 1, "text": "B"}]}
    value = {"v": 1, "id": "1", "request": {"prompt": ["a", "b"]}, "response": response}
    assert answers(write_lines(value)) == [("a", "A"), ("b", "B")]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_json_is_never_written(number: str):
    chat = json.loads(json.dumps({**CHAT, "temperature": 0}).replace("0", number))
    (record,) = parse_record(chat, "chat", "f:1")
    assert record.sampling == {}
    line = format_prompt(assign_id_and_split(normalise(record, keep_responses=False), 0.5))
    json.loads(line, parse_constant=lambda name: pytest.fail(name))
    (record,) = parse_record({**CHAT, "tools": [{"default": float(number)}]}, "chat", "f:1")
    with pytest.raises(Unusable, match="which is not JSON"):
        normalise(record, keep_responses=False)
    with pytest.raises(DataError, match="f:1 has the number .*, which is not JSON"):
        parse_prompt(
            json.dumps({"id": "1", "source": "s", **CHAT, "sampling": {"temperature": float(number)}}).encode(), "f:1"
        )


def responses(body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"model": "m", **body}}


def test_batches_for_the_responses_api_are_prompts(write_lines: Callable[..., str]):
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add 1 and 2"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
        {"role": "user", "content": "Thanks"},
    ]
    short = responses({"input": "Hi", "instructions": "Be kind", "max_output_tokens": 9, "temperature": 0.5})
    long = responses({"input": items, "tools": [{"type": "function", **function}], "reasoning": {"effort": "low"}})
    first, second = (normalise(record, keep_responses=False) for record in read(write_lines(short, long)))
    assert first.messages == [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    assert first.sampling == {"temperature": 0.5, "max_tokens": 9} and first.source == "batch"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert second.messages == [
        {"role": "user", "content": "Add 1 and 2"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Thanks"},
    ]
    assert second.tools == [{"type": "function", "function": function}]
    assert second.sampling == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "Hi", "previous_response_id": "r"}, "continues what is stored on a server"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "item of type item_reference"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tool that the server runs"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "multimodal content"),
        ({"input": None}, "no prompt in the request"),
    ],
)
def test_what_a_responses_request_lacks_is_counted(body: dict[str, Any], reason: str):
    with pytest.raises(Unusable, match=reason):
        for record in parse_record(responses(body), "batch", "f:1"):
            normalise(record, keep_responses=False)


def test_files_of_several_formats_are_refused_with_counts(write_lines: Callable[..., str]):
    with pytest.raises(DataError, match=r"prompts.jsonl begins with 2 OpenAI chat, 1 ShareGPT; wanted one format"):
        read(write_lines(CHAT, LINES["sharegpt"][1], CHAT))
    with pytest.raises(DataError, match=r"prompts.jsonl:31 is ShareGPT, but the file began as OpenAI chat"):
        read(write_lines(*[CHAT] * 30, LINES["sharegpt"][1]))
    with pytest.raises(DataError, match="begins with 1 of unknown format"):
        read(write_lines({"question": "?"}))


def test_an_empty_conversation_is_counted_not_refused(write_lines: Callable[..., str]):
    first, second = read_records(write_lines({"conversations": []}, LINES["sharegpt"][1]))
    assert isinstance(first, SkippedRecord) and first.reason == "empty conversation" and isinstance(second, Record)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "text", "id"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every part of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *itertools.chain.from_iterable(places(item, (*path, key)) for key, item in items)]


TOOLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
}
WHOLE = [value for _, value in LINES.values()] + [
    {**CHAT, **ANSWERED, "tools": [{}]},
    {"messages": [*CHAT["messages"], TOOLS]},
]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_part_may_be_malformed(data: st.DataObject):
    """A record with anything in place of one of its parts is read or has a reason; nothing else is raised."""
    value = copy.deepcopy(data.draw(st.sampled_from([*WHOLE, *EVENTS])))
    wrapped = {"value": value}
    *path, last = ("value", *data.draw(st.sampled_from(places(value))))
    holder: Any = wrapped
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(JSON)
    changed = wrapped["value"]
    for record in (changed, capture(CHAT, json.dumps(changed)), capture(changed)):
        name = name_format(record) if isinstance(record, dict) else None
        if name not in (None, "unknown"):
            with contextlib.suppress(Unusable, DataError):
                for parsed in parse_record(record, name, "f:1"):
                    line = format_prompt(assign_id_and_split(normalise(parsed, keep_responses=True), 0.5))
                    assert format_prompt(parse_prompt(line.encode(), "f:1")) == line
