"""Recipes: every fault is one sentence with the key, and a typo gets the key that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_plugin.common.recipes import read_yaml
from eagle_plugin.learning.train.recipe import TrainError, parse_recipe

GOOD = {"target": "t", "data": {"store": "s"}, "budget": {"updates": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' on line 3 is on line 1 already; keep one of them"),
        ("a:\n  b: 1\n  b: 2\n", "the key 'b' on line 3 is on line 2 already"),
        ("- a\n- b\n", "holds a list, wanted a mapping"),
        ("", "is empty, wanted a mapping"),
        ("a: [1\n", "is not YAML"),
        ("[" * 2000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(TrainError, match=r"^[^\n]+$") as refusal:
        read_yaml(tmp_path / "recipe.yaml", TrainError)
    assert message in str(refusal.value)


def test_keys_of_different_mappings_may_be_equal_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &one {x: 1}\nb: {x: 2}\nc: {<<: *one, y: 3}\n")
    assert read_yaml(path, TrainError) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 1, "y": 3}}
    path.write_bytes(bytes(range(256)))
    with pytest.raises(TrainError, match="is not YAML"):
        read_yaml(path, TrainError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_token": 5}, "batch_token: Extra inputs are not permitted (got 5), did you mean batch_tokens?"),
        ({"optimiser": {"weight_deacy": 0}}, "optimiser.weight_deacy: Extra inputs are not permitted (got 0), "
                                             "did you mean weight_decay?"),
        ({"phases": [{"share": 1, "step": 2}]}, "phases.0.step: Extra inputs are not permitted (got 2), "
                                                "did you mean steps?"),
        ({"data": {"store": {"url": "s", "wieght": 2}}}, "did you mean weight?"),
        ({"head": {"form": "x"}}, "did you mean from?"),
        ({"colour": 1}, "colour: Extra inputs are not permitted (got 1); correct"),
    ],
)  # fmt: skip
def test_a_typo_gets_the_key_that_was_meant(change: dict[str, object], message: str) -> None:
    parse_recipe(GOOD, "recipe")
    with pytest.raises(TrainError) as refusal:
        parse_recipe(GOOD | change, "recipe")
    assert message in str(refusal.value)
