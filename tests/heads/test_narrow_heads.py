"""A head narrower than its target has an embedding of its own, and is loaded, exported and checked like any other."""

from __future__ import annotations

import json
from pathlib import Path

import head_rows
import pytest
import torch
from head_edits import config, drop
from safetensors.torch import load_file

from eagle_plugin.cli import main
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.load import load_any_head


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target, good = head_rows.write_target(tmp_path)
    return target, head_rows.write_row("narrower than the target", good)


def test_it_is_exported_as_it_is(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, head = pair
    assert main(["export", str(head), str(tmp_path / "out"), "--target", str(target)]) == 0
    before, after = load_file(head / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(before["embed_tokens.weight"], after["embed_tokens.weight"])
    info = check_head(target, tmp_path / "out", algorithm="EAGLE3")
    written = read_config(tmp_path / "out")
    assert info.hidden_size == written["hidden_size"] == 145 and written["target_hidden_size"] == 290
    again = load_any_head(tmp_path / "out", target).state_dict()
    for name, tensor in load_any_head(head, target).state_dict().items():
        assert torch.equal(tensor, again[name]), name


def test_without_its_embedding_it_is_refused(pair: tuple[Path, Path]) -> None:
    target, head = pair
    drop("embed_tokens.weight")(head)
    with pytest.raises(HeadError, match=r"hidden_size 145, the target 290, and no embed_tokens\.weight"):
        load_any_head(head, target)
    with pytest.raises(HeadError, match=r"not embed_tokens\.weight"):
        check_head(target, head, algorithm="EAGLE3")


def test_another_targets_width_is_still_refused(pair: tuple[Path, Path]) -> None:
    """The negative control: it says the width of its target, which must be this one's."""
    target, head = pair
    config(target_hidden_size=300)(head)
    for read in (load_any_head, lambda h, t: check_head(t, h, algorithm="EAGLE3")):
        with pytest.raises(HeadError, match="has target_hidden_size 300, but the target"):
            read(head, target)


def test_the_output_of_the_last_layer_can_be_measured(pair: tuple[Path, Path]) -> None:
    """What a head that names it reads in training and in `check`: the last layer's states before the final norm."""
    from eagle_plugin.learning.data.rows import DataError
    from eagle_plugin.learning.data.store.features import Taps, load_target

    model = load_target(pair[0], torch.float32)
    layers = json.loads((pair[0] / "config.json").read_text())["num_hidden_layers"]
    ids = torch.arange(40, 50)[None]
    with torch.no_grad(), Taps(model, [2, layers]) as taps:
        aux, last = taps.run(ids, [10])
        assert aux is not None
        inputs = model(ids, output_hidden_states=True).hidden_states
        assert torch.equal(aux[..., :290], inputs[2])
        torch.testing.assert_close(model.model.norm(aux[..., 290:]), last)
        assert not torch.allclose(aux[..., 290:], last)
    with pytest.raises(DataError, match="aux layers 2,9"):
        Taps(model, [2, layers + 1])
