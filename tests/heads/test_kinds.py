"""The registry of head kinds: its entries are complete, and an entry with a module is all that a new kind needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.core.shape import Levels
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.draft_head import head_class
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.formats import Eagle3Format
from eagle_plugin.heads.kinds import HEADS, HeadSpec, all_kinds, find_spec, spec_of_tensors, stored_algorithm
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.train.methods import METHODS
from eagle_plugin.learning.train.recipe import HeadSettings


class ScaledHead(Eagle3Head):
    """An EAGLE-3 head that scales its fused features."""

    kind = "scaled"

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...]) -> None:
        super().__init__(config, aux_layers)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def fuse(self, features: Tensor) -> Tensor:
        return super().fuse(features) * self.scale


@pytest.fixture
def scaled() -> Iterator[None]:
    spec = HeadSpec(
        kind="scaled",
        module=f"{__name__}:ScaledHead",
        format=Eagle3Format(),
        architectures=("LlamaForCausalLMEagle3",),
        marker="scale",
        method="eagle3",
        levels=Levels.RECURRENT,
        objective="training_time_test",
    )
    before = dict(HEADS)
    HEADS.clear()
    HEADS.update({"scaled": spec} | before)
    yield
    HEADS.clear()
    HEADS.update(before)


def test_entries_name_what_exists() -> None:
    for kind, spec in all_kinds().items():
        assert (spec.kind, head_class(spec).kind) == (kind, kind) and spec.objective in METHODS
        assert spec.format.loader == spec.architectures[0]


def test_the_marker_decides_the_kind() -> None:
    names = {"fc.weight": "eagle2", "layers.0.hidden_norm.weight": "eagle3", "mask_hidden": "peagle"}
    stored: set[str] = set()
    for name, kind in names.items():
        stored.add(name)
        assert spec_of_tensors(stored) is find_spec(kind)
    assert spec_of_tensors({"norm.weight"}) is None
    assert spec_of_tensors(stored, "LlamaForCausalLMEagle") is find_spec("eagle2")  # the class of config.json limits it
    assert spec_of_tensors((), "LlamaForCausalLMEagle3") is find_spec("eagle3")  # tensors are missing
    assert spec_of_tensors(stored, "LlamaForCausalLM") is None
    assert stored_algorithm({"architectures": ["LlamaForCausalLMEagle"]}) == "EAGLE"
    assert stored_algorithm({}) == "EAGLE3"


def test_vllm_config() -> None:
    values_of = {kind: spec.vllm_config("head", 4) for kind, spec in all_kinds().items()}
    assert {kind: values["method"] for kind, values in values_of.items()} == {
        "eagle2": "eagle",
        "eagle3": "eagle3",
        "peagle": "eagle3",
        "dflash": "dflash",
    }
    assert [kind for kind, values in values_of.items() if values.get("parallel_drafting")] == ["peagle"]


def test_a_new_kind_is_an_entry(scaled: None, tiny_target: Path, tmp_path: Path) -> None:
    """It is created, saved, checked, recognised, loaded and accepted in a recipe without another change."""
    head = new_head("scaled", tiny_target)
    with torch.no_grad():
        head.get_parameter("scale").mul_(3)
    save_head(head, tmp_path / "head", target_dir=tiny_target, dtype=torch.float32)
    assert check_head(tiny_target, tmp_path / "head", algorithm="EAGLE3").kind == "scaled"
    loaded = load_any_head(tmp_path / "head", tiny_target)
    assert type(loaded).__name__ == "ScaledHead" and loaded.get_parameter("scale").mean() == 3
    assert HeadSettings(kind="scaled").kind == "scaled"


def test_a_kind_without_an_entry_is_not_known(tiny_target: Path) -> None:
    """Negative control of the test above."""
    with pytest.raises(HeadError, match="'scaled', wanted one of peagle, eagle3, eagle2, dflash"):
        new_head("scaled", tiny_target)
    with pytest.raises(ValueError, match="'auto', 'dflash', 'eagle2', 'eagle3' or 'peagle'"):
        HeadSettings(kind="scaled")
