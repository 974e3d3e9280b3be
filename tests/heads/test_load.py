"""load_any_head understands the checkpoints of other projects, and refuses to guess where one can mean two things."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trained_heads import Weights, rename, rewrite, run, trained_head

from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.interpretations import read_interpretations
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.peagle import PEagleHead

AUX = "eagle_aux_hidden_state_layer_ids"
TOKENS = torch.arange(100, 109)
FEATURES = torch.randn(9, 192, generator=torch.Generator().manual_seed(0))


def same(folder: Path, target: Path, ours: Path, width: int = 192) -> bool:
    states = [run(load_any_head(f, target), TOKENS, FEATURES[:, :width])[1] for f in (folder, ours)]
    return torch.equal(*states)


@pytest.fixture(scope="module")
def ours(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported heads: eagle2, eagle3 (3.0, draft vocabulary), aux (3.0, layers 1, 4, 6) and peagle (two layers)."""
    folder = tmp_path_factory.mktemp("heads")
    heads = {
        "eagle2": trained_head("eagle2", tiny_target),
        "eagle3": trained_head("eagle3", tiny_target, draft_ids=torch.arange(10, 138), norms="3.0"),
        "aux": trained_head("eagle3", tiny_target, aux_layers=(1, 4, 6), norms="3.0"),
        "peagle": trained_head("peagle", tiny_target, layers=2, mask_token_id=3, norms="3.0"),
    }
    for name, head in heads.items():
        save_head(head, folder / name, target_dir=tiny_target, dtype=torch.float32)
    return folder


def official(config: dict[str, Any]) -> dict[str, Any]:
    """SafeAILab's: LlamaForCausalLM for every kind of head, and no key of the engines."""
    kept = """
        hidden_size num_attention_heads num_key_value_heads intermediate_size vocab_size rms_norm_eps num_hidden_layers
        rope_theta draft_vocab_size max_position_embeddings
    """
    return {key: config[key] for key in kept.split() if key in config} | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("bias", [True, False])
def test_official_eagle2(bias: bool, ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    def change(weights: Weights) -> Weights:
        embedding = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"]
        extra = {"embed_tokens.weight": embedding.bfloat16()}  # a copy of the target's
        return {name: w for name, w in weights.items() if bias or name != "fc.bias"} | extra

    folder = rewrite(ours / "eagle2", tmp_path / "head", lambda c: official(c) | {"bias": bias}, change)
    assert same(folder, tiny_target, ours / "eagle2", 64)
    assert isinstance(load_any_head(folder, tiny_target), Eagle2Head)
    assert [r.aux_layers for r in read_interpretations(folder, tiny_target)] == [()]


@pytest.mark.parametrize("prefix", ["midlayer", "model.midlayer", "model.layers.0"])
def test_official_eagle3(prefix: str, ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = rewrite(ours / "eagle3", tmp_path / "head", official, lambda w: rename(w, "layers.0", prefix))
    assert same(folder, tiny_target, ours / "eagle3")


def speculators(config: dict[str, Any], kind: str, **keys: Any) -> dict[str, Any]:
    layer = {**official(config), "model_type": "llama", "head_dim": 16}
    del layer["architectures"]
    layer.pop("draft_vocab_size")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        **keys,
    }


def test_speculators(ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = rewrite(ours / "aux", tmp_path / "aux", lambda c: speculators(c, "eagle3", **{AUX: [1, 4, 6]}))
    assert load_any_head(folder, tiny_target).aux_layers == (1, 4, 6)
    assert same(folder, tiny_target, ours / "aux")

    # P-EAGLE: only vLLM's name of the later layers' first norm, and a flat vector for the mask.
    def change(weights: Weights) -> Weights:
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
        return {name: w for name, w in weights.items() if name != "layers.1.hidden_norm.weight"}

    keys = {"mask_token_id": 3, "norm_output": True}  # the second is without effect there
    folder = rewrite(ours / "peagle", tmp_path / "p", lambda c: speculators(c, "peagle", **keys), change)
    head = load_any_head(folder, tiny_target)
    assert isinstance(head, PEagleHead) and head.mask_token_id == 3
    assert same(folder, tiny_target, ours / "peagle")


READINGS: dict[str, tuple[dict[str, Any], list[tuple[tuple[int, ...], bool]]]] = {
    "no ids": ({}, [((2, 3, 4), False)]),
    "default ids where both engines mean them": ({AUX: [2, 3, 4]}, [((2, 3, 4), False)]),
    "both conventions": ({"eagle_config": {AUX: [0, 3, 5]}, AUX: [1, 4, 6]}, [((1, 4, 6), False)]),
    "SGLang's key": ({"eagle_config": {AUX: [1, 3, 5]}}, [((2, 4, 6), False), ((1, 3, 5), False)]),
    "vLLM's key": ({AUX: [1, 3, 5]}, [((1, 3, 5), False), ((2, 4, 6), False)]),
    "both alike": ({"eagle_config": {AUX: [1, 3, 5]}, AUX: [1, 3, 5]}, [((2, 4, 6), False), ((1, 3, 5), False)]),
    "impossible in one": ({"eagle_config": {AUX: [1, 3, 6]}}, [((1, 3, 6), False)]),
    "norm_output": ({"norm_output": True}, [((2, 3, 4), True), ((2, 3, 4), False)]),
    "norm_output of 3.1": ({"norm_output": True, "fc_norm": True}, [((2, 3, 4), True)]),
}


@pytest.mark.parametrize("case", READINGS)
def test_interpretations(case: str, ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    keys, wanted = READINGS[case]
    folder = rewrite(ours / "eagle3", tmp_path / "head", lambda c: c | {"eagle_config": {}} | keys)
    found = read_interpretations(folder, tiny_target)
    assert [(r.aux_layers, r.norm_output) for r in found] == wanted
    if len(wanted) > 1:
        with pytest.raises(HeadError, match="can mean the aux layers .* or .*eagle-plugin check"):
            load_any_head(folder, tiny_target)
    if "fc_norm" not in keys:
        heads = [load_any_head(folder, tiny_target, interpretation=r) for r in found]
        assert [h.aux_layers for h in heads] == [r.aux_layers for r in found]
        if case == "norm_output":  # the two meanings are two heads
            normed, plain = (run(head, TOKENS, FEATURES)[0] for head in heads)
            assert not torch.allclose(normed, plain, rtol=0.05)


def test_our_own_heads_are_never_ambiguous(ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    assert [r.aux_layers for r in read_interpretations(ours / "aux", tiny_target)] == [(1, 4, 6)]


REFUSED: dict[str, tuple[str, dict[str, Any], Weights, str]] = {
    "residual": ("eagle3", {"norm_before_residual": True}, {}, "norm_before_residual true, which SGLang"),
    "own embedding": ("eagle3", {"embed_requires_grad": True}, {}, "an embedding of its own"),
    "bias": ("eagle3", {}, {"layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias"),
    "layers": ("eagle3", {"model_type": "qwen3"}, {}, "model_type 'qwen3'"),
    "activation": ("eagle3", {"hidden_act": "gelu"}, {}, "hidden_act 'gelu', with which no engine"),
    "a part of the rotation": ("eagle3", {"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor 0.5, wanted 1"),
    "the same inside": (
        "eagle3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {},
        "partial_rotary_factor 0.5, wanted 1",
    ),
    "target": ("eagle3", {"vocab_size": 500}, {}, "vocab_size 500, but the target has 512"),
    "norms": ("peagle", {}, {"layers.1.input_layernorm.weight": torch.zeros(64)}, "different layers.1.hidden_norm"),
    "mask token": ("peagle", {"mask_token_id": None, "ptd_token_id": None}, {}, "mask_hidden but no mask_token_id"),
    "first norm": ("eagle2", {}, {"layers.0.input_layernorm.weight": torch.ones(64)}, "a norm before its first layer"),
    "bias of fc": ("eagle3", {}, {"fc.bias": torch.ones(64)}, "fc.bias, and engines differ"),
    "aux count": ("eagle3", {"eagle_config": {AUX: [0, 3]}, AUX: [1, 4]}, {}, "fc.weight with 192 inputs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    source, keys, extra, message = REFUSED[case]
    folder = rewrite(ours / source, tmp_path / "head", lambda c: c | keys, lambda w: w | extra)
    with pytest.raises(HeadError, match=message):
        load_any_head(folder, tiny_target)


def test_pickles_are_never_opened(ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(official(json.loads((ours / "eagle3/config.json").read_text()))))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(load_file(ours / "eagle3/model.safetensors")))
    with pytest.raises(HeadError, match=r"only pytorch_model\.bin.*safetensors.*save_file"):
        load_any_head(folder, tiny_target)


def test_a_whole_rotation_is_not_written(ours: Path, tiny_target: Path, tmp_path: Path) -> None:
    """`partial_rotary_factor` 1 inside the rotary options, which vLLM alone reads there."""
    options = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    keys = {"rope_parameters": options, "rope_scaling": None}
    folder = rewrite(ours / "eagle3", tmp_path / "head", lambda c: c | keys)
    save_head(load_any_head(folder, tiny_target), tmp_path / "new", target_dir=tiny_target)
    assert "partial_rotary_factor" not in (tmp_path / "new/config.json").read_text()
