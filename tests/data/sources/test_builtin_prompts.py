import hashlib
import json

import pytest

from eagle_plugin.data.sources.builtin_prompts import (
    builtin_prompts,
    documented_functions,
    sharegpt_openings,
    without,
    word_problem,
)
from eagle_plugin.data.sources.prompts import Prompt


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
