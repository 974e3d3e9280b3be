"""Every kind of file has the same records; errors name file, line and record of what is broken, cut, long or deep."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources import record_files
from eagle_plugin.learning.data.sources.conversation import Unusable
from eagle_plugin.learning.data.sources.formats import Record, parse_record, read_records
from eagle_plugin.learning.data.sources.prompts import normalise
from eagle_plugin.learning.data.sources.record_files import CUT, LocatedObject, SkippedRecord, read_objects

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_broken_lines_are_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n{broken}\n" + json.dumps(CHAT) + "\n")
    with pytest.raises(DataError, match=r"a.jsonl:3 is not JSON"):
        list(read_records(str(path)))
    path.write_text(json.dumps(CHAT) + "\n[1]\n")
    with pytest.raises(DataError, match=r"a.jsonl:2 holds a JSON list, wanted an object"):
        list(read_records(str(path)))
    path.write_text(
        json.dumps([CHAT] * 3, indent=1).replace('"role": "user"', '"role": user', 2).replace("user,", '"user",', 1)
    )
    with pytest.raises(DataError, match=r"a.jsonl:13 is not JSON"):
        list(read_records(str(path)))
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
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.sources.formats import read_records
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
        list(read_records(str(path)))


def test_parquet_without_its_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as where it is not installed
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1....PAR1")
    with pytest.raises(DataError, match="pip install pyarrow"):
        list(read_records(str(path)))


def test_parquet_rows(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT, CHAT]), tmp_path / "a.parquet")
    records = list(read_records(str(tmp_path / "a.parquet")))
    assert [record.messages for record in records if isinstance(record, Record)] == [CHAT["messages"]] * 2
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="a.parquet is a broken Parquet file"):
        list(read_records(str(tmp_path / "a.parquet")))


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
