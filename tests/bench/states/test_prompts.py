"""The user's held-out prompts and the sets become questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_plugin.bench.states import prompts
from eagle_plugin.bench.states.prompts import prompt_sets
from eagle_plugin.learning.data.rows import DataError

SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}


def write(path: Path, *rows: dict) -> Path:
    lines = ({"id": f"a-{number}", "source": "a", **row} for number, row in enumerate(rows))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_held_out_prompts_are_asked_and_others_are_counted(tmp_path: Path) -> None:
    later = [{"role": "assistant", "content": "Because."}, {"role": "user", "content": "And then?"}]
    path = write(
        tmp_path / "prompts.jsonl",
        {"split": "val", "messages": [ASK]},
        {"split": "train", "messages": [ASK]},
        {"split": "val", "messages": [SYSTEM, ASK, *later]},
        {"split": "val", "prompt_ids": [1, 2]},
        {"split": "val", "prompt": "Once upon a time"},
        {"split": "val", "messages": [{"role": "user", "content": "word " * 900}]},
    )
    found = prompt_sets((), path, tmp_path, limit=10, longest=100)["held-out"]
    assert [question.messages for question in found.questions] == [None, [SYSTEM, ASK], None]
    assert [question.prompt for question in found.questions] == ["Why?", "Why?", "Once upon a time"]
    assert found.left_out == {"of split train": 1, "without text": 1, "longer than 100 tokens": 1}


def test_without_a_split_all_prompts_are_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"messages": [ASK]}, {"prompt": "Go on"})
    found = prompt_sets((), path, tmp_path, limit=1, longest=100)["held-out"]
    assert len(found.questions) == 1 and found.left_out == {}


def test_the_digest_is_of_what_is_asked(tmp_path: Path) -> None:
    files = [
        write(tmp_path / name, {"messages": turns})
        for name, turns in (("a", [ASK]), ("b", [ASK]), ("c", [SYSTEM, ASK]))
    ]
    one, same, other = (prompt_sets((), path, tmp_path, 9, 99)["held-out"].sha256 for path in files)
    assert one == same != other


def test_standard_sets_and_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "eval_prompts", lambda name: [f"{name} {number}" for number in range(9)])
    found = prompt_sets(("gsm8k", "shipped"), None, tmp_path, limit=5, longest=1000)
    assert [question.prompt for question in found["gsm8k"].questions] == [f"gsm8k {number}" for number in range(5)]
    assert {question.group for question in found["shipped"].questions} == {"chat", "code", "maths"}


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts were named"):
        prompt_sets((), None, tmp_path, 9, 99)
    path = write(tmp_path / "prompts.jsonl", {"prompt_ids": [1]})
    with pytest.raises(ValueError, match=r"has no prompt that can be asked \(1 without text\)"):
        prompt_sets((), path, tmp_path, 9, 99)
    path.write_text("{")
    with pytest.raises(DataError, match="prompts.jsonl:1 is not JSON"):
        prompt_sets((), path, tmp_path, 9, 99)
