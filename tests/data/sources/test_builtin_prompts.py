import hashlib
import json

import pytest

from eagle_plugin.common.errors import UserError
from eagle_plugin.learning.data import builtin
from eagle_plugin.learning.data.sources.builtin_prompts import (
    builtin_prompts,
    documented_functions,
    sharegpt_openings,
    without,
    word_problem,
)
from eagle_plugin.learning.data.sources.prompts import Prompt


def test_word_problems_are_those_that_the_shipped_data_was_made_from():
    text = "\n".join(map(word_problem, range(4000)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "ce72b991c18c48de"


def test_openings_are_read_up_to_the_cut_of_a_truncated_file(tmp_path):
    def record(opening, speaker="human"):
        return {"conversations": [{"from": speaker, "value": opening}, {"from": "gpt", "value": "answer"}]}

    kept = [f"an opening that is long enough, number {n}" for n in range(5)]
    dropped = [record("too short"), record("x" * 1200), record("not ascii at all, é" * 2), record(kept[0] + "!", "gpt")]
    text = json.dumps([*map(record, kept), record(kept[0]), *dropped, record("cut off, and long enough")])
    path = tmp_path / "sharegpt.json"
    path.write_text(text[:-40])
    found = sharegpt_openings(path)
    assert sorted(found) == kept
    assert found == sorted(kept, key=lambda opening: hashlib.sha256(opening.encode()).hexdigest())


def test_sources_are_combined_three_to_one_to_one_with_temperatures_in_blocks():
    prompts = list(builtin_prompts([f"opening {n}" for n in range(1500)], ["def f(): ..."]))
    assert [prompt.id for prompt in prompts[:6]] == [
        "sharegpt-1", "sharegpt-2", "code-3", "maths-4", "sharegpt-5", "sharegpt-6",
    ]  # fmt: skip
    assert sum(prompt.source == "code" for prompt in prompts) == 1  # used up: its numbers are left out
    assert "code-8" not in {prompt.id for prompt in prompts}
    for prompt in prompts:
        number = int(prompt.id.rpartition("-")[2])
        assert prompt.sampling == {"temperature": float(number // 1200 % 2)}
    assert {prompt.split for prompt in prompts} == {"train", "val"}
    assert len({prompt.id for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("text", "left"), [("The  Question\n of MT-bench?", 0), ("The question", 1)])
def test_held_out_prompts_are_left_out_whatever_their_spacing(text, left):
    prompt = Prompt("a", "test", messages=[{"role": "user", "content": "the question of mt-bench?"}])
    assert len(list(without([prompt], [text]))) == left


def test_functions_are_signature_and_docstring(tmp_path):
    method = 'def area(self, unit="m"):\n    """The area of the shape in square units.\n\n    Of any.\n    """\n'
    module = "class Shape:\n" + "".join(f"    {line}\n" if line else "\n" for line in method.splitlines())
    module += "        return self.side ** 2\n\ndef short():\n    'Too short.'\n    return 1\n"
    for folder in ("site-packages", "json", "idlelib"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shape.py").write_text(module)
    (tmp_path / "broken.py").write_text("def (")
    assert list(documented_functions(tmp_path)) == [method.rstrip("\n")]


@pytest.fixture
def few_prompts(monkeypatch):
    """The command's prompts are the openings 0 to 9, and the dialogues a to e."""
    monkeypatch.setattr(builtin, "cached_file", lambda file, report: None)
    monkeypatch.setattr(builtin, "sharegpt_openings", lambda path: [f"opening {n}" for n in range(10)])
    monkeypatch.setattr(builtin, "sharegpt_dialogues", lambda path: [(name, f"answer {name}") for name in "abcde"])
    monkeypatch.setattr(builtin, "code_prompts", list)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--limit", "4"], ["opening 0", "opening 1", None, "opening 2"]),
        (["--skip", "4", "--limit", "3"], ["opening 3", "opening 4", None]),
        (["--skip", "12"], ["opening 9"]),
        (["--recorded", "--accept-terms", "sharegpt", "--skip", "2", "--limit", "2"], ["c", "d"]),
    ],
)
def test_prompts_are_left_out_from_the_first(few_prompts, tmp_path, options, found):
    out = tmp_path / "prompts.jsonl"
    assert builtin.main([*options, "--out", str(out)]) == 0
    texts = [json.loads(line)["messages"][0]["content"] for line in out.read_text().splitlines()]
    assert [text if text in found else None for text in texts] == found  # None: a word problem


def test_no_prompt_is_left(few_prompts, tmp_path):
    with pytest.raises(UserError, match="--skip is 99, and there are no more prompts than that"):
        builtin.main(["--skip", "99", "--out", str(tmp_path / "prompts.jsonl")])
    assert not list(tmp_path.iterdir())
