"""What vLLM's own rules make of a head: served with a warning, left to vLLM's own worker, or refused in a sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import head_rows
import pytest
import torch
from head_edits import Edit, config, drop, put
from head_rows import AUX, LAYERS
from safetensors.torch import load_file, save_file
from vllm_configs import configure
from vllm_models import Served, make_config

from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError, LeftToEngine, read_config
from eagle_plugin.heads.vllm_rules import captured_layers, check_head
from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.vllm import head_forwards, plugin_config
from eagle_plugin.vllm.draft_tables import without_whole_tables
from eagle_plugin.vllm.head_forwards import HeadForwards


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return head_rows.write_target(tmp_path_factory.mktemp("rows"))


def edited(models: tuple[Path, Path], folder: Path, *edits: Edit) -> Path:
    shutil.copytree(models[1], folder)
    for edit in edits:
        edit(folder)
    return folder


@pytest.mark.parametrize("name", [name for name, row in head_rows.ROWS.items() if row.vllm == "plugin"])
def test_rows_that_the_plugin_serves(name: str, models: tuple[Path, Path]) -> None:
    assert plugin_config.is_served(configure(models[0], head_rows.write_row(name, models[1])).speculative_config)


AUX_IDS = {  # eagle_config, top level -> what vLLM captures on a target of 8 layers
    (None, None): (2, 4, 5),
    ((1, 3, 5), None): (1, 3, 5),
    ((1, 3, 5), (2, 4, 6)): (2, 4, 6),
    (None, (6, 2, 4)): (2, 4, 6),
    (None, (0, 4, LAYERS)): (0, 4, LAYERS),
    ((), ()): (2, 4, 5),
}


@pytest.mark.parametrize("ids", AUX_IDS)
def test_captured_layers(ids: tuple[tuple[int, ...] | None, ...], models: tuple[Path, Path], tmp_path: Path) -> None:
    inner, top = (None if part is None else list(part) for part in ids)
    head = edited(models, tmp_path / "head", config(**{AUX: top}, eagle_config={AUX: inner}))
    assert captured_layers(read_head(head), read_config(models[0])) == AUX_IDS[ids]
    warnings = check_head(models[0], head, "eagle3")
    assert any("in eagle_config alone" in line for line in warnings) == bool(inner and not top)


def reverse_vocabulary(folder: Path) -> None:
    put("d2t", torch.arange(289, -1, -1) - torch.arange(290))(folder)


def int8_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"fc.weight": weights["fc.weight"].to(torch.int8)}, folder / "model.safetensors")


def float_table(folder: Path) -> None:
    put("d2t", torch.zeros(290))(folder)


def pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


LEFT = {
    "quantised weights": int8_weights,
    "a table of floats": float_table,
    "a token twice": head_rows.one_token_twice,
}
REFUSED: dict[str, tuple[Edit, str]] = {
    "a layer beyond the target": (config(**{AUX: [2, 4, 9]}), "aux layer ids .*wanted different ones from 0 to 8"),
    "a layer twice": (config(**{AUX: [2, 4, 4]}), "aux layer ids .*wanted different ones"),
    "a reordered vocabulary": (reverse_vocabulary, "d2t that reorders the whole vocabulary"),
    "no table": (config(draft_vocab_size=32), "drafts from 32 of 290 tokens but has no d2t"),
    "a missing tensor": (drop("fc.weight"), "no fc.weight"),
    "a missing matrix": (drop("midlayer.mlp.up_proj.weight"), "not layers.0.mlp.up_proj.weight"),
    "no width of the target": (config(target_hidden_size=None), "target_hidden_size None, but the target's"),
    "another activation": (config(hidden_act="gelu"), "hidden_act 'gelu', which vLLM's draft MLP cannot do"),
    "another shape": (put("norm.weight", torch.ones(3)), r"norm.weight of shape \[3\], wanted \[290\]"),
}


def last_state_beside_an_fc(folder: Path) -> None:
    """Which vLLM's class then does not read."""
    config(eagle_config={"use_aux_hidden_state": False})(folder)


def last_state(folder: Path) -> None:
    last_state_beside_an_fc(folder)
    drop("fc.weight")(folder)


LEFT |= {"the last hidden state": last_state, "the last hidden state beside an fc": last_state_beside_an_fc}


@pytest.mark.parametrize("case", LEFT)
def test_left_to_vllm(case: str, models: tuple[Path, Path], tmp_path: Path, lines: list[str]) -> None:
    head = edited(models, tmp_path / "head", LEFT[case])
    with pytest.raises(LeftToEngine):
        check_head(models[0], head, "eagle3")
    configured = configure(models[0], head)
    assert not plugin_config.is_served(configured.speculative_config)
    assert any("is served by vLLM's own worker: " in line and str(head) in line for line in lines)


def test_a_pickle_is_served_with_a_warning(models: tuple[Path, Path], tmp_path: Path, lines: list[str]) -> None:
    head = edited(models, tmp_path / "head", pickled_weights)
    with pytest.raises(LeftToEngine):
        check_head(models[0], head, "eagle3")
    assert plugin_config.is_served(configure(models[0], head).speculative_config)
    assert any(f"{head} has only pytorch_model.bin: the engine loads the draft head" in line for line in lines)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_every_worker(case: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    edit, phrase = REFUSED[case]
    head = edited(models, tmp_path / "head", edit)
    with pytest.raises(HeadError, match=phrase) as refused:
        check_head(models[0], head, "eagle3")
    assert not isinstance(refused.value, LeftToEngine)
    with pytest.raises(StartRefused, match=phrase):
        configure(models[0], head)


def test_the_method_of_another_kind(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(HeadError, match='method eagle; use "method": "eagle3" with this head'):
        check_head(models[0], edited(models, tmp_path / "head"), "eagle")


def test_a_leftover_quantisation_is_not_used(models: tuple[Path, Path], lines: list[str]) -> None:
    head = head_rows.write_row("a leftover quantization_config", models[1])
    configured = configure(models[0], head)
    assert configured.speculative_config.draft_model_config.quantization is None
    assert any("has a quantization_config (fp8)" in line and "remove the key" in line for line in lines)


@pytest.mark.matrix  # loads both models twice; `test_head_rows.py` serves the same head
def test_a_table_of_the_whole_vocabulary_is_left_out(models: tuple[Path, Path]) -> None:
    """vLLM's own class has no parameter for it."""
    head = head_rows.write_row("tables of the whole vocabulary", models[1])
    configured = make_config(models[0], head, "eagle3")
    with pytest.raises(ValueError, match="draft_id_to_target_id"):
        Served(configured)
    with without_whole_tables():
        loaded = Served(make_config(models[0], head, "eagle3"))
    assert loaded.draft.draft_id_to_target_id is None


def test_a_loaded_map_that_names_a_token_twice_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that vLLM fetches by its name, nobody has looked at the map before."""
    monkeypatch.setattr(head_forwards, "use_int8_output", lambda _: None)
    drafting = object.__new__(HeadForwards)
    drafting.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    drafting._draft_attn_layer_names = set()
    for offsets in (torch.tensor([3, 0, 1]), torch.tensor([3, 0, 2])):  # target ids 3, 1, 3 and 3, 1, 4
        drafting.model = torch.nn.Module()
        drafting.model.draft_id_to_target_id = torch.nn.Parameter(offsets, requires_grad=False)
        if offsets[2] == 1:
            with pytest.raises(StartRefused, match=r"maps 3 draft ids to 2 target ids.*EAGLE_PLUGIN=0"):
                drafting.complete_head()
        else:
            drafting.complete_head()
            assert drafting._draft_to_target.tolist() == [3, 1, 4]
