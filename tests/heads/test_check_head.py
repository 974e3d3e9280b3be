"""check_head: every head that the engine could not serve is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from head_edits import Edit, config, d2t, drop, put, set_d2t, shards, tensors

from eagle_plugin.heads.checkpoint import HeadError, check_head
from eagle_plugin.heads.files import read_config

ALGORITHMS = {"tiny_eagle2": "EAGLE", "tiny_eagle3": "EAGLE3", "tiny_eagle3_reduced": "EAGLE3"}


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lost_shard(folder: Path) -> None:
    shards(folder)
    (folder / "model-2.safetensors").unlink()


def prefixed(t: dict[str, torch.Tensor]) -> None:
    renamed = {f"model.{name}": t[name] for name in t}
    t.clear()
    t.update(renamed)


NAN = torch.tensor([float("nan")] * 2 + [0.0] * 126)
AUX = "eagle_aux_hidden_state_layer_ids"
REFUSALS: dict[str, tuple[str, Edit, list[str]]] = {
    # files
    "no folder": ("tiny_eagle3", shutil.rmtree, ["is not a folder", "config.json"]),
    "no config": ("tiny_eagle3", lambda p: (p / "config.json").unlink(), ["has no config.json"]),
    "config not json": ("tiny_eagle3", lambda p: (p / "config.json").write_text("{"), ["is not JSON"]),
    "config a list": ("tiny_eagle3", lambda p: (p / "config.json").write_text("[]"), ["JSON list", "object"]),
    "no weights": ("tiny_eagle3", lambda p: (p / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "pickle": ("tiny_eagle3", only_pickle, ["only pytorch_model.bin", "convert"]),
    "truncated": ("tiny_eagle3", truncate, ["cannot be read as safetensors"]),
    "not safetensors": (
        "tiny_eagle3",
        lambda p: (p / "model.safetensors").write_bytes(b"x" * 64),
        ["cannot be read as safetensors"],
    ),
    "lost shard": ("tiny_eagle3", lost_shard, ["model-2.safetensors", "2 shards"]),
    # architecture
    "a language model": (
        "tiny_eagle3",
        config(architectures=["LlamaForCausalLM"]),
        ["['LlamaForCausalLM']", "LlamaForCausalLMEagle3"],
    ),
    "no architecture": ("tiny_eagle3", config(architectures=...), ["None", "LlamaForCausalLMEagle3"]),
    "activation": ("tiny_eagle3", config(hidden_act="gelu"), ["hidden_act 'gelu'", "silu"]),
    "mlp bias": ("tiny_eagle2", config(mlp_bias=True), ["mlp_bias True"]),
    # sizes
    "hidden size": ("tiny_eagle2", config(hidden_size=128), ["hidden_size 128", "64"]),
    "target hidden size": ("tiny_eagle3", config(target_hidden_size=128), ["target_hidden_size 128", "64"]),
    "vocabulary": ("tiny_eagle3", config(vocab_size=500), ["vocab_size 500", "512"]),
    "no size": ("tiny_eagle3", config(hidden_size=...), ["hidden_size None", "whole number"]),
    "size a string": ("tiny_eagle3", config(num_hidden_layers="1"), ["num_hidden_layers '1'", "whole number"]),
    "heads": ("tiny_eagle3", config(num_attention_heads=3, head_dim=...), ["64", "3", "head_dim"]),
    "kv heads": ("tiny_eagle3", config(num_key_value_heads=3), ["num_key_value_heads 3", "divisor", "4"]),
    "head dim": ("tiny_eagle3", config(head_dim=32), ["q_proj", "[64, 128]", "[128, 128]"]),
    # aux layers
    "aux count": ("tiny_eagle3", config(num_aux_hidden_states=2), ["num_aux_hidden_states 2", "3 aux layers"]),
    "aux too high": ("tiny_eagle3", config(eagle_config={AUX: [1, 2, 6]}), ["[1, 2, 6]", "0 to 6", "7 layers"]),
    "aux negative": ("tiny_eagle3", config(eagle_config={AUX: [-2, 2, 4]}), ["[-2, 2, 4]", "0 to 6"]),
    "aux twice": ("tiny_eagle3", config(eagle_config={AUX: [1, 1, 4]}), ["[1, 1, 4]", "rising"]),
    "aux falling": ("tiny_eagle3", config(eagle_config={AUX: [4, 2, 1]}), ["[4, 2, 1]", "rising"]),
    "aux words": ("tiny_eagle3", config(eagle_config={AUX: "1,2,3"}), ["'1,2,3'", "list"]),
    "aux at top level": ("tiny_eagle3", config(**{AUX: [1, 3, 5]}), ["[1, 3, 5]", "top level", "[2, 3, 4]"]),
    "Llama 4's width": (
        "tiny_eagle3",
        config(model_type="llama4_text", intermediate_size_mlp=96),
        ["gate_proj", "[128, 64]", "[96, 64]"],
    ),
    "Llama 4's default width": ("tiny_eagle3", config(model_type="llama4_text"), ["gate_proj", "[16384, 64]"]),
    "fc width": (
        "tiny_eagle3",
        config(eagle_config={AUX: [1, 2]}, num_aux_hidden_states=2),
        ["fc.weight", "[64, 192]", "[64, 128]"],
    ),
    # tensors
    "missing": ("tiny_eagle3", drop("fc.weight", "norm.weight"), ["fc.weight, norm.weight", "random"]),
    "missing in the layer": ("tiny_eagle3", drop("midlayer.mlp.up_proj.weight"), ["layers.0.mlp.up_proj.weight"]),
    "missing layer": ("tiny_eagle3", config(num_hidden_layers=2), ["layers.1.self_attn.q_proj.weight"]),
    "missing norm": ("tiny_eagle3", config(fc_norm=True), ["fc_norm.0.weight", "fc_norm.2.weight"]),
    "no fc bias": ("tiny_eagle2", drop("fc.bias"), ["fc.bias", "zeros"]),
    "model prefix": ("tiny_eagle2", tensors(prefixed), ["fc.weight", "without the prefix 'model.'"]),
    "shape": ("tiny_eagle3", put("norm.weight", torch.ones(3)), ["norm.weight", "[3]", "[64]"]),
    "quantised": ("tiny_eagle3", put("fc.weight", torch.ones(64, 192, dtype=torch.int8)), ["fc.weight", "I8", "BF16"]),
    "tied EAGLE-2": ("tiny_eagle2", config(tie_word_embeddings=True), ["tie_word_embeddings true", "false"]),
    "qkv bias": ("tiny_eagle3", put("midlayer.self_attn.q_proj.bias", torch.ones(64)), ["q_proj.bias", "drops"]),
    # P-EAGLE
    "mask width": ("tiny_eagle3", put("mask_hidden", torch.ones(1, 64)), ["mask_hidden", "[1, 64]", "[1, 192]"]),
    "no mask token": ("tiny_eagle3", put("mask_hidden", torch.ones(1, 192)), ["mask_token_id None", "0 to 511"]),
    "mask token a text": (
        "tiny_eagle3",
        lambda p: (put("mask_hidden", torch.ones(1, 192))(p), config(mask_token_id="3")(p)),
        ["mask_token_id '3'", "whole number"],
    ),
    "mask token beyond the vocabulary": (
        "tiny_eagle3",
        lambda p: (put("mask_hidden", torch.ones(1, 192))(p), config(ptd_token_id=512)(p)),
        ["mask_token_id 512", "0 to 511"],
    ),
    "token without features": ("tiny_eagle3", config(ptd_token_id=3), ["ptd_token_id 3", "no tensor mask_hidden"]),
    "claims parallel drafting": (
        "tiny_eagle3",
        config(parallel_drafting=True),
        ["parallel_drafting True", "no tensor mask_hidden", "EAGLE-3"],
    ),
    # draft vocabulary
    "no lm_head": ("tiny_eagle3_reduced", drop("lm_head.weight"), ["lm_head.weight", "export"]),
    "no draft size": ("tiny_eagle3", config(draft_vocab_size=...), ["no draft_vocab_size", "512"]),
    "draft size": ("tiny_eagle3", config(draft_vocab_size=1000), ["1000", "512"]),
    "lm_head replaced": ("tiny_eagle3", config(draft_vocab_size=None), ["replaces", "512"]),
    "tied": ("tiny_eagle3", config(tie_word_embeddings=True), ["tie_word_embeddings true", "false"]),
    "no d2t": ("tiny_eagle3_reduced", drop("d2t"), ["128 of 512", "no d2t"]),
    "d2t length": ("tiny_eagle3_reduced", d2t(lambda t: t[:100].clone()), ["[100]", "[128]"]),
    "d2t too high": ("tiny_eagle3_reduced", set_d2t(3, 600), ["draft id 3", "603", "0 to 511"]),
    "d2t negative": ("tiny_eagle3_reduced", set_d2t(3, -4), ["draft id 3", "-1", "0 to 511"]),
    "d2t twice": ("tiny_eagle3_reduced", lambda p: d2t(_repeat_first)(p), ["128 draft ids to 127"]),
    "d2t not finite": ("tiny_eagle3_reduced", put("d2t", NAN), ["F32", "2 non-finite"]),
    "d2t a float": ("tiny_eagle3_reduced", put("d2t", torch.zeros(128)), ["F32", "int64"]),
    "lm_head rows": ("tiny_eagle3_reduced", put("lm_head.weight", torch.ones(64, 64)), ["[64, 64]", "[128, 64]"]),
}


def _repeat_first(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    table[1] = table[0] - 1
    return table


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str, request: pytest.FixtureRequest, tmp_path: Path, tiny_target: Path) -> None:
    source, edit, phrases = REFUSALS[case]
    folder = tmp_path / "head"
    shutil.copytree(request.getfixturevalue(source), folder)
    check_head(tiny_target, folder, algorithm=ALGORITHMS[source])  # good before the edit
    edit(folder)
    with pytest.raises(HeadError) as refused:
        check_head(tiny_target, folder, algorithm=ALGORITHMS[source])
    message = str(refused.value)
    for phrase in phrases:
        assert phrase in message
    assert str(folder) in message
    assert "\n" not in message and ". " not in message and not message.endswith(".")


@pytest.mark.parametrize(("source", "wrong"), [("tiny_eagle2", "EAGLE3"), ("tiny_eagle3", "EAGLE")])
def test_head_of_the_other_kind(source: str, wrong: str, request: pytest.FixtureRequest, tiny_target: Path) -> None:
    with pytest.raises(HeadError, match=f"use --speculative-algorithm {ALGORITHMS[source]} with this head"):
        check_head(tiny_target, request.getfixturevalue(source), algorithm=wrong)


def test_unknown_algorithm(tiny_eagle3: Path, tiny_target: Path) -> None:
    with pytest.raises(HeadError, match="MEDUSA, wanted EAGLE or EAGLE3"):
        check_head(tiny_target, tiny_eagle3, algorithm="MEDUSA")


def test_target_folder_missing(tiny_eagle3: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="is not a folder"):
        check_head(tmp_path / "none", tiny_eagle3, algorithm="EAGLE3")


def test_default_aux_layers_of_a_shallow_target(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config(tiny_target) | {"num_hidden_layers": 6}))
    with pytest.raises(HeadError, match=r"\[2, 3, 3\] of a target with 6 layers"):
        check_head(tmp_path, tiny_eagle3, algorithm="EAGLE3")
