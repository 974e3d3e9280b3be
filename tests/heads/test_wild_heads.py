"""Every layout of a public head is accepted, converted or refused by name, and no tensor is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from head_edits import put
from safetensors.torch import load_file
from trained_heads import run
from wild_heads import ACCEPTED, CONVERTED, Random, draft, write
from wild_layouts import LAYOUTS

from eagle_plugin.cli import main
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head, warn_of_biases
from eagle_plugin.heads.files import HeadError, LeftToEngine, canonical_name, load_weights, read_config
from eagle_plugin.heads.interpretations import read_interpretations
from eagle_plugin.heads.kinds import stored_algorithm
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import MANIFEST
from eagle_plugin.heads.vllm_classes import SERVED
from eagle_plugin.heads.vllm_rules import describe_head

TOKENS = torch.arange(100, 109)
FEATURES = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))
# What a written-out EAGLE-3 layer reads of the layouts that have one layer and a plain or extended fusion.
WRITTEN_OUT = {
    "official EAGLE-3": {"first": "midlayer"},
    "SpecForge": {"first": "midlayer"},
    "SpecForge, EAGLE-3.1": {"first": "midlayer", "fc_norms": "fc_norm.0 fc_norm.1 fc_norm.2"},
    "SpecForge, aux norms": {"first": "midlayer", "fc_norms": "aux_norm_low aux_norm_mid aux_norm_high"},
    "speculators": {"first": "layers.0"},
    "speculators, norm before fc": {"first": "layers.0", "input_norm": "input_norm"},
    "AngelSlim": {"first": "midlayer"},
    "ModelOpt": {"first": "layers.0"},
    "ModelOpt, empty list of ids": {"first": "layers.0"},
    "biases that are zero": {"first": "midlayer"},
}


def assert_sentence(message: str, phrases: tuple[str, ...]) -> None:
    for phrase in phrases:
        assert phrase in message, message
    assert "\n" not in message and ". " not in message and not message.endswith("."), message


def load_as_export(name: str, folder: Path, target: Path) -> DraftHead:
    """The head that the export writes, with --aux-layers where the layout needs it."""
    found = read_interpretations(folder, target)
    meant = LAYOUTS[name].meant
    one = next((one for one in found if one.aux_layers == meant), None)
    return load_any_head(folder, target, interpretation=one)


@pytest.mark.parametrize("name", LAYOUTS)
def test_check(name: str, tiny_target: Path, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[name], write(LAYOUTS[name], tmp_path / "head", tiny_target)
    algorithm = stored_algorithm(read_config(folder))
    if layout.check == ACCEPTED:
        assert check_head(tiny_target, folder, algorithm=algorithm).warnings == ()
        return
    with pytest.raises(HeadError) as refused:
        check_head(tiny_target, folder, algorithm=algorithm)
    assert_sentence(str(refused.value), tuple(layout.check))


@pytest.mark.parametrize("name", LAYOUTS)
def test_rules_of_vllm(name: str, tiny_target: Path, tmp_path: Path) -> None:
    """`tests/engines/vllm/test_wild_heads.py` loads the same folders into vLLM."""
    layout, folder = LAYOUTS[name], write(LAYOUTS[name], tmp_path / "head", tiny_target)
    if layout.vllm == ACCEPTED:
        assert describe_head(tiny_target, folder).architecture in SERVED
        return
    with pytest.raises(HeadError) as refused:
        describe_head(tiny_target, folder)
    assert_sentence(str(refused.value), tuple(layout.vllm))
    left = any(phrase.startswith(("the plugin serves", "the plugin reads no")) for phrase in layout.vllm)
    assert isinstance(refused.value, LeftToEngine) == left


@pytest.mark.parametrize("name", LAYOUTS)
def test_export(name: str, tiny_target: Path, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[name], write(LAYOUTS[name], tmp_path / "head", tiny_target)
    if layout.export != CONVERTED:
        with pytest.raises(HeadError) as refused:
            load_as_export(name, folder, tiny_target)
        assert_sentence(str(refused.value), tuple(layout.export))
        return
    if layout.meant is not None:
        with pytest.raises(HeadError, match="can mean the aux layers"):
            load_any_head(folder, tiny_target)
    before = load_as_export(name, folder, tiny_target)
    save_head(before, tmp_path / "out", target_dir=tiny_target, dtype=torch.float32)
    info = check_head(tiny_target, tmp_path / "out", algorithm=before.spec.algorithm)
    assert info.warnings == () and (layout.meant is None or info.aux_layer_ids == layout.meant)

    # As an engine loads it, with nothing but the keys and the tensors of the new folder.
    (tmp_path / "out" / MANIFEST).unlink()
    after = load_any_head(tmp_path / "out", tiny_target)
    features = FEATURES[:, : 192 if info.aux_layer_ids else 64]
    state, logits = run(after, TOKENS, features)
    for found, wanted in zip((state, logits), run(before, TOKENS, features), strict=True):
        assert torch.equal(found, wanted)
    if name in WRITTEN_OUT:
        weights = load_file(folder / "model.safetensors") | {"embed_tokens.weight": after.embedding}
        torch.testing.assert_close(logits, draft(weights, WRITTEN_OUT[name], TOKENS, features), rtol=0, atol=2e-5)

    # Every stored value is in the new head, but for copies of the target's and tables that are made anew.
    lost = {"embed_tokens.weight", "t2d", "layers.1.input_layernorm.weight"}
    kept = load_weights(tmp_path / "out")
    for stored, tensor in load_weights(folder).items():
        if stored not in lost and not (stored.endswith(".bias") and not tensor.any()):
            assert torch.equal(kept[stored].flatten(), tensor.float().flatten().to(kept[stored].dtype)), stored


CONVERTIBLE = [name for name, layout in LAYOUTS.items() if layout.export == CONVERTED]


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_no_unknown_tensor_is_lost(name: str, tiny_target: Path, tmp_path: Path) -> None:
    """The negative control of the test above: one tensor more, which no class reads."""
    folder = write(LAYOUTS[name], tmp_path / "head", tiny_target)
    put("layers.0.mlp.extra.weight", torch.ones(3))(folder)
    with pytest.raises(HeadError) as refused:
        load_as_export(name, folder, tiny_target)
    assert_sentence(str(refused.value), ("has layers.0.mlp.extra.weight, wanted only",))
    if LAYOUTS[name].check == ACCEPTED:
        (warning,) = check_head(tiny_target, folder, algorithm=stored_algorithm(read_config(folder))).warnings
        assert "layers.0.mlp.extra.weight" in warning and "engine drops" in warning


@pytest.mark.parametrize("name", ["official EAGLE-1 and EAGLE-2", "SpecForge, EAGLE-3.1", "P-EAGLE"])
def test_no_missing_tensor_is_invented(name: str, tiny_target: Path, tmp_path: Path) -> None:
    """Each tensor that a layout needs, left out, refuses the head."""
    layout = LAYOUTS[name]
    weights = layout.weights(Random(tiny_target))
    free = ("embed_tokens", "t2d", ".bias")  # the target's, or made anew, or zero
    needed = [stored for stored in weights if not any(part in stored for part in free)]
    for i, left_out in enumerate(needed):
        without = {stored: tensor for stored, tensor in weights.items() if stored != left_out}
        folder = write(replace(layout, weights=lambda _, kept=without: kept), tmp_path / str(i), tiny_target)
        with pytest.raises(HeadError, match=canonical_name(left_out).split(".")[0]):  # fc, layers, ...
            load_as_export(name, folder, tiny_target)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_bias_of_one_engine(
    bias: float, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(LAYOUTS["official EAGLE-1, bias of fc"], tmp_path / "head", tiny_target)
    put("fc.bias", torch.full((64,), bias))(folder)
    assert main(["export", str(folder), str(tmp_path / "out"), "--target", str(tiny_target)]) == 0
    assert ("fc.bias with values other than zero, which SGLang adds" in capsys.readouterr().err) == bool(bias)
    assert len(warn_of_biases(load_weights(tmp_path / "out"), tmp_path / "out")) == int(bias)


def test_the_command(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused head leaves one line and no folder."""
    folder = write(LAYOUTS["ModelOpt, Kimi K2"], tmp_path / "head", tiny_target)
    assert main(["export", str(folder), str(tmp_path / "out"), "--target", str(tiny_target)]) == 2
    error = capsys.readouterr().err
    assert "multi-head latent attention" in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()
