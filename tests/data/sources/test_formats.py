"""One record of every format, in every kind of file; errors name the line of broken, cut and mixed files."""

from __future__ import annotations

import base64
import contextlib
import copy
import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.data.rows import DataError
from eagle_plugin.data.sources import record_files
from eagle_plugin.data.sources.conversation import Unusable
from eagle_plugin.data.sources.formats import Record, name_format, parse_record, read_records
from eagle_plugin.data.sources.prompts import assign_id_and_split, format_prompt, normalise, parse_prompt
from eagle_plugin.data.sources.record_files import CUT, LocatedObject, SkippedRecord, read_objects

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


def test_broken_lines_are_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n{broken}\n" + json.dumps(CHAT) + "\n")
    with pytest.raises(DataError, match=r"a.jsonl:3 is not JSON"):
        read(str(path))
    path.write_text(json.dumps(CHAT) + "\n[1]\n")
    with pytest.raises(DataError, match=r"a.jsonl:2 holds a JSON list, wanted an object"):
        read(str(path))
    path.write_text(
        json.dumps([CHAT] * 3, indent=1).replace('"role": "user"', '"role": user', 2).replace("user,", '"user",', 1)
    )
    with pytest.raises(DataError, match=r"a.jsonl:13 is not JSON"):
        read(str(path))
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT)[:-5])
    *_, last = read_records(str(path))
    assert last == SkippedRecord(f"{path}:2", CUT)


BROKEN = ("{broken}", "[1]", '"text"', '{"question": "?"}', "\xff", "x" * 3000)


def test_broken_lines_are_left_out_and_counted_if_that_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_files, "LONGEST_LINE", 2000)
    path = tmp_path / "a.jsonl"
    good = json.dumps(CHAT)
    for place in (0, 3, 30):  # among the records that tell the format, first and later, and after them
        lines = [good] * place + list(BROKEN) + [good] * 5
        path.write_text("\n".join(lines) + "\n", encoding="latin-1")
        with pytest.raises(DataError):
            list(read_records(str(path)))
        items = list(read_records(str(path), skip_broken=True))
        skipped = [(item.where, item.reason) for item in items if isinstance(item, SkippedRecord)]
        reasons = ["line that is not JSON", "JSON list in place of an object", "JSON str in place of an object",
                   "unknown format", "line that is not JSON", "line that is too long"]  # fmt: skip
        assert skipped == [(f"{path}:{place + i}", reason) for i, reason in enumerate(reasons, 1)]
        assert len(items) == len(lines)
    path.write_text("{broken}\n" * 3)
    with pytest.raises(DataError, match="begins with no record"):
        list(read_records(str(path), skip_broken=True))
    path.write_text('{"question": 1}\n' * 3)
    with pytest.raises(DataError, match="begins with 3 of unknown format"):
        list(read_records(str(path), skip_broken=True))


def test_in_an_array_only_whole_records_can_be_left_out(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([CHAT, 5, CHAT]))
    with pytest.raises(DataError, match="a.json:1, record 2 holds a JSON int, wanted an object"):
        list(read_records(str(path)))
    _, second, third = read_records(str(path), skip_broken=True)
    assert second == SkippedRecord(f"{path}:1, record 2", "JSON int in place of an object")
    assert isinstance(third, Record)
    path.write_text("[{broken}, " + json.dumps([CHAT, CHAT])[1:])
    with pytest.raises(DataError, match="a.json:1 is not JSON .* in record 1"):
        list(read_records(str(path), skip_broken=True))
    path.write_text(json.dumps([CHAT]) + "\n" + json.dumps([CHAT]))
    with pytest.raises(DataError, match="a.json:2 goes on after the array's end"):
        list(read_records(str(path)))


@settings(max_examples=60, deadline=None)
@given(indent=st.sampled_from([None, 0, 1, 4]), chunk=st.integers(8, 60), before=st.text("\n\r\t ", max_size=5))
def test_records_of_an_array_have_their_line_and_number(tmp_path_factory, indent: int | None, chunk: int, before: str):
    objects = [{"prompt": f"{i}\n", "more": [{}] * (i % 3)} for i in range(7)]
    text = before + json.dumps(objects, indent=indent)
    path = tmp_path_factory.mktemp("lines") / "a.json"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files, "CHUNK", chunk)
        found = [item.where for item in read_objects(str(path))]
    starts = [text.index(f'"prompt": "{i}') for i in range(7)]
    starts = [text.rindex("{", 0, start) for start in starts]
    assert found == [f"{path}:{text.count(chr(10), 0, at) + 1}, record {i}" for i, at in enumerate(starts, 1)]


def test_5000_levels_are_not_called_broken_json(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    deep = '{"messages": ' + "[" * 5000 + "]" * 5000 + "}"
    path.write_text(json.dumps(CHAT) + "\n" + deep + "\n" + json.dumps(CHAT) + "\n")
    _, second, _ = read_records(str(path))
    assert second == SkippedRecord(f"{path}:2", "nested too deeply")
    path.write_text(f"[{deep}]")
    with pytest.raises(DataError, match="a.jsonl:1, record 1 is nested too deeply"):
        list(read_records(str(path)))
    for tools in ([[]], {"a": []}):
        for _ in range(150):  # Python reads these, and cannot write all of them
            tools = [tools]
        (record,) = parse_record({**CHAT, "tools": tools}, "chat", "f:1")
        with pytest.raises(Unusable, match="more than 100 levels of nesting"):
            normalise(record, keep_responses=False)


LONG = """
import gzip, resource, sys
from eagle_plugin.data.rows import DataError, read_rows
from eagle_plugin.data.sources.formats import read_records
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for read in (read_records, lambda path: read_records(path, skip_broken=True)):
    try:
        print(*(item.reason for item in read({path!r})))
    except DataError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("start", ['{"prompt": "', pytest.param('[{"prompt": "', marks=pytest.mark.matrix)])
def test_a_line_of_200_mb_is_refused_by_its_size_in_bounded_memory(start: str, tmp_path: Path):
    path = tmp_path / "long.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(start.encode())
        for _ in range(200):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n')
    code = LONG.format(path=str(path))
    first, second, grown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert f"{path}:1" in first and "is longer than 64 Mi" in first
    assert "begins with no record" in second or "is longer than 64 Mi" in second
    assert int(grown) < 400, f"{grown} MiB"


@pytest.mark.parametrize("kind", ["plain", "gz", "zst", "array", "array.gz", "bom"])
def test_kinds_of_file_give_the_same_records(kind: str, tmp_path: Path):
    objects = [{"prompt": f"Ünïcode {i} \n"} for i in range(40)]
    text = json.dumps(objects, indent=2) if "array" in kind else "".join(json.dumps(o) + "\n" for o in objects)
    data = text.encode("utf-8-sig" if kind == "bom" else "utf-8")
    if kind.endswith("gz"):
        data = gzip.compress(data)
    if kind == "zst":
        data = zstandard.ZstdCompressor().compress(data)
    path = tmp_path / "named.by.nothing"
    path.write_bytes(data)
    taken: list[int] = []
    assert [item.value for item in read_objects(str(path), taken.append) if isinstance(item, LocatedObject)] == objects
    assert sum(taken) == len(data)


def test_a_cut_gzip_file_is_refused(tmp_path: Path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(json.dumps(CHAT).encode() * 100)[:-9])
    with pytest.raises(DataError, match="a.gz is a broken gzip file"):
        read(str(path))


def test_parquet_without_its_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as where it is not installed
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1....PAR1")
    with pytest.raises(DataError, match="pip install pyarrow"):
        read(str(path))


def test_parquet_rows(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT, CHAT]), tmp_path / "a.parquet")
    assert [record.messages for record in read(str(tmp_path / "a.parquet"))] == [CHAT["messages"]] * 2
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="a.parquet is a broken Parquet file"):
        read(str(tmp_path / "a.parquet"))


OBJECTS = [{"prompt": 'a]},{["\\ é'}, {"prompt": "", "n": [1, {"x": None}]}, {"prompt": "long" * 20}]


@settings(max_examples=150, deadline=None)
@given(chunk=st.integers(1, 50), share=st.floats(0, 1), indent=st.sampled_from([None, 1]))
def test_an_array_cut_anywhere_is_read_up_to_the_cut(tmp_path_factory, chunk: int, share: float, indent: int | None):
    whole = json.dumps(OBJECTS, indent=indent, ensure_ascii=False).encode()
    ends = [len(json.dumps(OBJECTS[:n], indent=indent, ensure_ascii=False).encode()) for n in range(1, 4)]
    # An array of n records less its closing bracket (and the newline before it) has its n-th record whole.
    ends = [end - (1 if indent is None else 2) for end in ends]
    cut = 1 + round(share * (len(whole) - 1))
    path = tmp_path_factory.mktemp("cut") / "a.json"
    path.write_bytes(whole[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files, "CHUNK", chunk)
        items = list(read_objects(str(path)))
    assert [item.value for item in items if isinstance(item, LocatedObject)] == OBJECTS[
        : sum(end <= cut for end in ends)
    ]
    assert [item.reason for item in items if isinstance(item, SkippedRecord)] == ([CUT] if cut < len(whole) else [])


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
