"""The prompts of the loop: two parts without a common text, the same on every run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_plugin.learning.data import target_files
from eagle_plugin.learning.data.provenance import Terms, read_sources, write_sources
from eagle_plugin.learning.data.rows import read_rows
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt, read_prompts
from eagle_plugin.learning.loop.prompts import (
    LoopError,
    own_prompts,
    question_of,
    split_prompts,
    write_held_out_rows,
    write_prompts,
)


def prompt(text: str, split: str = "train") -> Prompt:
    return Prompt(f"p-{text}", "own", split, messages=[{"role": "user", "content": text}])  # type: ignore[arg-type]


def contents(prompts: list[Prompt]) -> set[str]:
    return {question_of(one) for one in prompts}


def test_the_parts_have_no_text_in_common_and_do_not_depend_on_the_order() -> None:
    prompts = [prompt(f"question {number % 40}") for number in range(60)]  # a third of them twice
    train, held_out = split_prompts(prompts, 30, 10) or ([], [])
    assert len(contents(train)) == 30 and len(contents(held_out)) == 10 and not contents(train) & contents(held_out)
    assert split_prompts(prompts[::-1], 30, 10) is not None
    again, rest = split_prompts(prompts[::-1], 30, 10) or ([], [])
    assert (contents(again), contents(rest)) == (contents(train), contents(held_out))
    assert split_prompts(prompts, 31, 10) is None  # 40 different texts


def test_prompts_of_split_val_are_held_out_first_and_never_trained_on() -> None:
    prompts = [prompt(f"train {number}") for number in range(20)] + [prompt(f"val {n}", "val") for n in range(6)]
    train, held_out = split_prompts(prompts, 15, 4) or ([], [])
    assert all(text.startswith("val") for text in contents(held_out))
    train, held_out = split_prompts(prompts, 15, 8) or ([], [])
    assert sum(text.startswith("val") for text in contents(held_out)) == 6
    assert not any(text.startswith("val") for text in contents(train))


def test_the_library_has_enough_prompts_for_the_default_loop(tmp_path: Path) -> None:
    write_prompts(None, 300, 40, tmp_path / "prompts.jsonl", tmp_path / "held-out.jsonl")
    train, held_out = (list(read_prompts(tmp_path / f"{name}.jsonl")) for name in ("prompts", "held-out"))
    assert (len(train), len(held_out)) == (300, 40) and not contents(train) & contents(held_out)
    assert [one.split for one in train] == ["val"] * 6 + ["train"] * 294  # 6 for the learning curve
    assert {one.split for one in held_out} == {"val"}
    assert read_sources(tmp_path / "prompts.jsonl") == {"stdlib": Terms("PSF-2.0")}


def test_of_own_prompts_the_first_question_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second"},
    ]
    path = tmp_path / "own.jsonl"
    raw = Prompt("p-2", "own", prompt="raw text")
    path.write_text(format_prompt(Prompt("p-1", "own", messages=turns)) + format_prompt(raw))
    (found,) = own_prompts(path)
    assert found.messages == turns[:2]
    (tmp_path / "measured.jsonl").write_text(format_prompt(found))
    tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=lambda chat, **_: [len(chat), len(chat[0])])
    monkeypatch.setattr(target_files, "load_tokenizer", lambda target: tokenizer)
    write_held_out_rows(tmp_path / "measured.jsonl", tmp_path, tmp_path / "rows.jsonl")
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert (row.id, row.source, row.prompt_ids) == ("p-1#0", "own", [2, 2])  # with the system turn
    # The answers are the target's own, so what forbids to train on the recorded ones does not matter.
    write_sources(path, {"own": Terms("mit", trains_models=False, answers_only=True)})
    write_prompts(path, 1, 0, tmp_path / "prompts.jsonl", tmp_path / "none.jsonl")
    assert read_sources(tmp_path / "prompts.jsonl") == {"own": Terms("mit")}
    with pytest.raises(LoopError, match="found 1 different prompts, wanted 300 \\+ 40"):
        write_prompts(path, 300, 40, tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_what_is_chosen_of_private_prompts_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, measured = tmp_path / "own.jsonl", tmp_path / "measured.jsonl"
    own.write_text("".join(format_prompt(prompt(f"question {number}")) for number in range(20)))
    tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=lambda chat, **_: [1, 2])
    monkeypatch.setattr(target_files, "load_tokenizer", lambda target: tokenizer)
    for mode in (0o600, 0o644):
        own.chmod(mode)
        write_prompts(own, 10, 5, tmp_path / "prompts.jsonl", measured)
        write_held_out_rows(measured, tmp_path, tmp_path / "rows.jsonl")
        for name in ("prompts.jsonl", "measured.jsonl", "rows.jsonl"):
            assert (tmp_path / name).stat().st_mode & 0o777 == mode, name
            (tmp_path / name).unlink()
