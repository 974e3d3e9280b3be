"""save_head: what is written, that it is written whole, and that loading and saving again changes no byte."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trained_heads import trained_head

from eagle_plugin.heads import export
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.new_config import window_keys

AUX = "eagle_aux_hidden_state_layer_ids"
DRAFT_IDS = torch.arange(10, 138)
HEADS: dict[str, dict[str, Any]] = {
    "eagle2": {"kind": "eagle2"},
    "eagle3": {"kind": "eagle3", "draft_ids": DRAFT_IDS},
    "eagle3 custom": {"kind": "eagle3", "norms": "3.0", "aux_layers": (1, 4, 6), "layers": 2},
    "eagle3 window": {"kind": "eagle3", "window": 48, "layers": 2, "draft_ids": DRAFT_IDS},
    "peagle": {"kind": "peagle", "layers": 2, "draft_ids": DRAFT_IDS, "mask_token_id": 3},
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_and_saving_changes_no_byte(name: str, dtype: torch.dtype, tiny_target: Path, tmp_path: Path) -> None:
    head = trained_head(target=tiny_target, **HEADS[name])
    notes = {"training": {"updates": 7}, "acceptance": [0.5, 0.4]}
    save_head(head, tmp_path / "a", target_dir=tiny_target, manifest=notes, dtype=dtype)
    again = load_any_head(tmp_path / "a", tiny_target, torch.float32)
    save_head(again, tmp_path / "b", target_dir=tiny_target, manifest=notes, dtype=dtype)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    with torch.no_grad():  # the digest sees a change of the smallest kind
        next(again.parameters()).view(-1)[0] += 0.01
    save_head(again, tmp_path / "b", target_dir=tiny_target, manifest=notes, dtype=dtype)
    assert digests(tmp_path / "a") != digests(tmp_path / "b")
    info = check_head(tiny_target, tmp_path / "a", algorithm=head.spec.algorithm)
    assert (info.kind, info.aux_layer_ids) == (head.kind, head.aux_layers)
    assert again.window == HEADS[name].get("window")


def exported(folder: Path, name: str, target: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    save_head(trained_head(target=target, **HEADS[name]), folder, target_dir=target)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_eagle2_files(tiny_target: Path, tmp_path: Path) -> None:
    config, weights = exported(tmp_path / "head", "eagle2", tiny_target)
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert not weights["fc.bias"].any() and weights["fc.bias"].shape == (64,)
    for name in ("lm_head.weight", "embed_tokens.weight", "layers.0.input_layernorm.weight", "d2t"):
        assert name not in weights


def test_eagle3_files(tiny_target: Path, tmp_path: Path) -> None:
    config, weights = exported(tmp_path / "head", "eagle3", tiny_target)
    # The engines' default layers are written without ids, which would differ between the engines.
    assert AUX not in config and AUX not in config["eagle_config"]
    assert config["fc_norm"] and config["norm_output"] and config["draft_vocab_size"] == 128
    assert torch.equal(weights["d2t"] + torch.arange(128), DRAFT_IDS)
    assert weights["t2d"].nonzero().flatten().equal(DRAFT_IDS)
    assert weights["lm_head.weight"].shape == (128, 64)


def test_custom_aux_layers_and_two_layers(tiny_target: Path, tmp_path: Path) -> None:
    config, weights = exported(tmp_path / "head", "eagle3 custom", tiny_target)
    assert config[AUX] == [1, 4, 6] and config["eagle_config"][AUX] == [0, 3, 5]
    assert not {"d2t", "t2d"} & set(weights)  # vLLM refuses them with a whole vocabulary
    assert torch.equal(weights["layers.1.hidden_norm.weight"], weights["layers.1.input_layernorm.weight"])
    assert not torch.equal(weights["layers.0.hidden_norm.weight"], weights["layers.0.input_layernorm.weight"])


def test_peagle_files(tiny_target: Path, tmp_path: Path) -> None:
    config, weights = exported(tmp_path / "head", "peagle", tiny_target)
    assert weights["mask_hidden"].shape == (1, 192)
    assert config["mask_token_id"] == config["ptd_token_id"] == 3
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize("name", HEADS)
def test_never_copied(name: str, tmp_path: Path, tiny_target: Path) -> None:
    """Keys of a target that would mislead a head's loader are not copied."""
    target = tmp_path / "target"
    target.mkdir()
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (target / file).symlink_to(tiny_target / file)
    config = json.loads((tiny_target / "config.json").read_text())
    misleading = {
        "layer_types": ["full_attention"] * 7,
        "partial_rotary_factor": 0.25,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "fp8"},
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "bias": True,
    }
    (target / "config.json").write_text(json.dumps(config | misleading))
    written, weights = exported(tmp_path / "head", name, target)
    assert {key: written[key] for key in misleading if key in written} == {
        "tie_word_embeddings": False,
        "attention_bias": False,
        **window_keys(HEADS[name].get("window"), 2),  # of the head's own
    }
    assert {n for n in weights if n.endswith("bias")} <= {"fc.bias"}


def test_foreign_files_are_not_replaced(tiny_target: Path, tmp_path: Path) -> None:
    head, folder = trained_head("eagle2", tiny_target), tmp_path / "head"
    save_head(head, folder, target_dir=tiny_target)
    save_head(head, folder, target_dir=tiny_target)  # its own files are
    (folder / "thesis.txt").write_text("x")
    with pytest.raises(HeadError, match=r"thesis\.txt"):
        save_head(head, folder, target_dir=tiny_target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]


def test_not_finite(tiny_target: Path, tmp_path: Path) -> None:
    head = trained_head("eagle2", tiny_target)
    with torch.no_grad():
        head.fc.weight[0, 0] = 1e30
    save_head(head, tmp_path / "wide", target_dir=tiny_target)
    with pytest.raises(HeadError, match=r"fc\.weight has values that are not finite in torch\.float16"):
        save_head(head, tmp_path / "narrow", target_dir=tiny_target, dtype=torch.float16)
    assert not (tmp_path / "narrow").exists()


def export_and_die(head: DraftHead, folder: Path, target: Path) -> None:
    export._put = lambda new, old: os.kill(os.getpid(), signal.SIGKILL)
    save_head(head, folder, target_dir=target)


def test_a_killed_export_leaves_the_old_head(tiny_target: Path, tmp_path: Path) -> None:
    folder, head = tmp_path / "head", trained_head("eagle2", tiny_target)
    save_head(head, folder, target_dir=tiny_target, manifest={"training": 1})
    before = digests(folder)
    child = multiprocessing.get_context("fork").Process(target=export_and_die, args=(head, folder, tiny_target))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert digests(folder) == before
