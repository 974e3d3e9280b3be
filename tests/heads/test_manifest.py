"""eagle_plugin.json: a head is refused or warned about when its target is not the one it was trained for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from trained_heads import trained_head

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.manifest import parallel_levels, read_manifest, trained_depths
from eagle_plugin.policy.shapes import PARALLEL_LEVELS


@pytest.fixture
def pair(tiny_target: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the target, and a head on its layers 1, 4 and 6."""
    target, head = tmp_path / "target", tmp_path / "head"
    shutil.copytree(tiny_target, target)
    save_head(
        trained_head("eagle3", target, aux_layers=(1, 4, 6)),
        head,
        target_dir=target,
        manifest={"target_name": "tiny", "acceptance": [0.5]},
    )
    assert check_head(target, head, algorithm="EAGLE3").warnings == ()
    return target, head


def test_content(pair: tuple[Path, Path]) -> None:
    manifest = read_manifest(pair[1])
    assert manifest is not None
    assert (manifest["kind"], manifest["aux_layers"], manifest["acceptance"]) == ("eagle3", (1, 4, 6), [0.5])
    assert manifest["target"]["name"] == "tiny"


def test_saved_again_by_another_library(pair: tuple[Path, Path]) -> None:
    """Only the meaning of a tokenizer.json counts."""
    path = pair[0] / "tokenizer.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(values.items()))))
    assert check_head(*pair, algorithm="EAGLE3").warnings == ()


def test_other_ids(pair: tuple[Path, Path]) -> None:
    path = pair[0] / "tokenizer.json"
    values = json.loads(path.read_text())
    a, b = list(values["model"]["vocab"])[20:22]
    values["model"]["vocab"][a], values["model"]["vocab"][b] = 21, 20
    path.write_text(json.dumps(values))
    with pytest.raises(HeadError, match="trained for tiny, whose tokens have other ids"):
        check_head(*pair, algorithm="EAGLE3")


def test_other_template(pair: tuple[Path, Path]) -> None:
    (pair[0] / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (warning,) = check_head(*pair, algorithm="EAGLE3").warnings
    assert "another chat template" in warning


def test_other_config(pair: tuple[Path, Path]) -> None:
    path = pair[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 2.0}))
    (warning,) = check_head(*pair, algorithm="EAGLE3").warnings
    assert "another config.json" in warning


@pytest.mark.parametrize("ids", [[1, 4, 5], None])
def test_ids_of_other_layers(ids: list[int] | None, pair: tuple[Path, Path]) -> None:
    """Ids in the wrong convention, or none: SGLang would capture layers that the head was not trained on."""
    path = pair[1] / "config.json"
    config = json.loads(path.read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    del config["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(config))
    captured = "2, 3, 4" if ids is None else "2, 5, 6"
    with pytest.raises(HeadError, match=rf"trained on the inputs of target layers \[1, 4, 6\].*capture \[{captured}\]"):
        check_head(*pair, algorithm="EAGLE3")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "aux_layers": 3, "target": {}}'])
def test_not_a_manifest(text: str, pair: tuple[Path, Path]) -> None:
    (pair[1] / "eagle_plugin.json").write_text(text)
    with pytest.raises(HeadError, match=r"eagle_plugin\.json"):
        check_head(*pair, algorithm="EAGLE3")


def test_tokenizer_kept_elsewhere_is_not_compared(pair: tuple[Path, Path]) -> None:
    target, head = pair
    (target / "tokenizer.json").unlink()
    assert check_head(target, head, algorithm="EAGLE3").warnings == ()


@pytest.mark.parametrize(
    ("training", "depths"),
    [
        ({"recipe": {"phases": [{"steps": 2}, {"steps": 8}]}}, 8),
        ({"recipe": {"phases": []}}, None),
        ({"recipe": {"phases": [{"steps": "many"}]}}, None),
        ({"recipe": 3}, None),
        ({}, None),
    ],
)
def test_levels_that_a_head_was_trained_for(pair: tuple[Path, Path], training: object, depths: int | None) -> None:
    path = pair[1] / "eagle_plugin.json"
    assert trained_depths(pair[1]) is None and trained_depths(pair[0]) is None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"training": training}))
    assert trained_depths(pair[1]) == depths


def test_the_levels_that_trees_of_a_head_get(pair: tuple[Path, Path]) -> None:
    """Deep ones for a head that drafts all of them in one forward, which its mask token tells."""
    head = pair[1]
    record, config = head / "eagle_plugin.json", head / "config.json"

    def train(steps: int) -> None:
        training = {"recipe": {"phases": [{"steps": steps}]}}
        record.write_text(json.dumps(json.loads(record.read_text()) | {"training": training}))

    train(3)
    assert parallel_levels(head) is None
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ptd_token_id": 5}))
    assert parallel_levels(head) == 3
    record.unlink()
    assert parallel_levels(head) == PARALLEL_LEVELS
    assert parallel_levels(None) is None and parallel_levels("a name/on a hub") is None
    config.write_text("{")
    with pytest.raises(HeadError, match="config.json"):
        parallel_levels(head)
