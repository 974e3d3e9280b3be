"""What a head's files show of bad drafts is one warning each, and a good head has none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from head_edits import Edit, config, put, set_d2t, tensors
from safetensors.torch import load_file

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.suspicions import suspicions
from eagle_plugin.heads.vllm_rules import describe_head

NOISE = torch.randn(512, 64, generator=torch.Generator().manual_seed(3))


def zeros(names: list[str]) -> Edit:
    return tensors(lambda t: [t[name].zero_() for name in names])


def rotary(**options: Any) -> Edit:
    """Put options into both spellings of the rotary embedding."""
    options = {"rope_type": "default", "rope_theta": 10000.0} | options
    return config(rope_scaling=options, rope_parameters=options)


SUSPECT: dict[str, tuple[Edit, list[str]]] = {
    "a random embedding": (put("embed_tokens.weight", NOISE), ["embed_tokens.weight", "correlation", "remove"]),
    "an embedding of zeros": (put("embed_tokens.weight", 0 * NOISE), ["embed_tokens.weight", "correlation 0.00"]),
    "in half precision": (put("embed_tokens.weight", NOISE.bfloat16()), ["embed_tokens.weight", "correlation"]),
    "tables of two vocabularies": (
        tensors(lambda t: t.update(t2d=t["t2d"].roll(7))),
        ["contradict each other", "of 128 tokens of d2t are not in t2d, which has 128"],
    ),
    "another rope": (config(rope_theta=5e5, rope_parameters=...), ["rope_theta 500000", "its target with 10000"]),
    "a part of the rotation": (rotary(partial_rotary_factor=0.5), ["partial_rotary_factor 0.5", "vLLM", "SGLang all"]),
    "zeros": (zeros(["fc.weight", "lm_head.weight"]), ["fc.weight and lm_head.weight with zeros alone", "copy"]),
    "a leftover quantization_config": (
        config(quantization_config={"quant_method": "fp8"}),
        ["quantization_config (fp8)", "its weights are plain", "remove the key"],
    ),
}


@pytest.mark.parametrize("case", SUSPECT)
def test_one_warning(case: str, tiny_eagle3_reduced: Path, tiny_target: Path, tmp_path: Path) -> None:
    edit, phrases = SUSPECT[case]
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3_reduced, folder)
    assert suspicions(read_head(folder), tiny_target) == []
    edit(folder)
    (warning,) = suspicions(read_head(folder), tiny_target)
    for phrase in phrases:
        assert phrase in warning
    assert str(folder) in warning and "\n" not in warning and ". " not in warning and not warning.endswith(".")
    # It never ends a start.
    heard: list[str] = []
    info = check_head(tiny_target, folder, algorithm="EAGLE3", misread=heard.append)
    assert warning in info.warnings and warning in describe_head(tiny_target, folder).warnings


def test_what_training_leaves_is_no_suspicion(tiny_eagle3_reduced: Path, tiny_target: Path, tmp_path: Path) -> None:
    """An embedding that was trained further, rounded, or of another width; tables that agree in another order."""
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3_reduced, folder)
    target = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"]
    for own in (target + 0.5 * NOISE, target.bfloat16(), NOISE[:, :32].contiguous(), target.half()):
        put("embed_tokens.weight", own)(folder)
        assert suspicions(read_head(folder), tiny_target) == []
    swapped = read_head(folder)
    first, second = load_file(folder / "model.safetensors")["d2t"][:2].tolist()
    set_d2t(0, second + 1)(folder)
    set_d2t(1, first - 1)(folder)
    assert suspicions(read_head(folder), tiny_target) == [] and swapped.stored.keys() == read_head(folder).stored.keys()


def test_dynamic_positions_of_sglang(tiny_eagle3_reduced: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3_reduced, folder)
    rotary(rope_type="dynamic", factor=4.0)(folder)
    (warning,) = check_head(tiny_target, folder, algorithm="EAGLE3").warnings
    assert "the type dynamic, of which SGLang scales the base of all positions" in warning
    assert "the type dynamic" not in " ".join(describe_head(tiny_target, folder).warnings)
