"""Heads that stock engines serve, or fail with, each made from one good head by an edit: the rows of a table.

The target says what follows from the current token; the good head knows it, so that a head which is read as it was
meant reaches an accept length near the greatest one, and one that is misread does not.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from bigram_models import bigram_eagle3_head, bigram_target
from head_edits import Edit, config, drop, put, set_d2t, tensors
from safetensors.torch import load_file, save_file
from tiny_models import tiny_eagle3_head

AUX = "eagle_aux_hidden_state_layer_ids"
LAYERS = 8
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@dataclass(frozen=True)
class Row:
    """One head, and what is expected of an engine that gets it."""

    edit: Edit
    vllm: str  # "plugin", "engine", or a phrase of the sentence that ends the start
    sglang: str
    stock_vllm: bool  # whether vLLM alone serves it
    stock_sglang: bool
    right: bool = True  # whether the drafts are those of the good head where the plugin serves


def _together(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def narrow(folder: Path) -> None:
    """A head of half the hidden size, with an embedding of its own, as trained on a target of another width."""
    target = folder.parent / "target"
    written = json.loads((target / "config.json").read_text())
    width = written["hidden_size"]
    shutil.rmtree(folder)
    tiny_eagle3_head(folder, target)
    half = width // 2
    generator = torch.Generator().manual_seed(4)

    def change(t: dict[str, torch.Tensor]) -> None:
        made = {name: _narrowed(name, tensor, half, width) for name, tensor in t.items()}
        for name in ("embed_tokens.weight", "lm_head.weight"):
            made[name] = torch.randn(written["vocab_size"], half, generator=generator)
        t.clear()
        t.update(made)

    tensors(change)(folder)
    config(hidden_size=half, target_hidden_size=width, intermediate_size=half)(folder)


def _narrowed(name: str, tensor: torch.Tensor, half: int, width: int) -> torch.Tensor:
    """The first half of each axis that is as long as the target's hidden size, but for what `fc` reads."""
    for axis, length in enumerate(tensor.shape):
        if length in (width, 2 * width) and not (name.startswith("fc") and axis):
            tensor = tensor.narrow(axis, 0, length // 2)
    return tensor.contiguous()


def one_token_twice(folder: Path) -> None:
    """A table of the draft vocabulary with which siblings of a draft tree could be one token."""
    put("d2t", torch.zeros(290, dtype=torch.int64))(folder)
    set_d2t(0, 1)(folder)


IDENTITY = {"d2t": torch.zeros(290, dtype=torch.int64), "t2d": torch.ones(290, dtype=torch.bool)}
ROWS: dict[str, Row] = {
    "as it should be": Row(lambda folder: None, "plugin", "plugin", True, True),
    "no lm_head": Row(
        _together(drop("lm_head.weight"), config(draft_vocab_size=...)),
        "plugin", "has no draft_vocab_size", True, False,
    ),
    "no lm_head, draft_vocab_size null": Row(
        _together(drop("lm_head.weight"), config(draft_vocab_size=None)), "plugin", "plugin", True, True
    ),
    "tied beside an own lm_head": Row(config(tie_word_embeddings=True), "plugin", "plugin", True, True),
    "vLLM's key of aux layers": Row(config(**{AUX: [2, 4, 6]}), "plugin", "plugin", True, True),
    "SGLang's key of aux layers": Row(
        config(eagle_config={"use_aux_hidden_state": True, AUX: [1, 3, 5]}), "plugin", "plugin", True, True
    ),
    "the output of the last layer": Row(
        config(**{AUX: [4, 6, LAYERS]}), "plugin", "plugin", True, True
    ),
    "narrower than the target": Row(narrow, "plugin", "plugin", True, True, right=False),
    "tables of the whole vocabulary": Row(
        tensors(lambda t: t.update(IDENTITY)), "plugin", "plugin", False, True
    ),
    "an empty quantization_config": Row(
        config(quantization_config={}), "plugin", "has a quantization_config", True, False
    ),
    "a leftover quantization_config": Row(
        config(quantization_config=FP8), "plugin", "has a quantization_config", False, False
    ),
}  # fmt: skip


def write_target(folder: Path) -> tuple[Path, Path]:
    """The target, and the good head, which drafts from the whole vocabulary."""
    target = bigram_target(folder / "target", layers=LAYERS)
    head = bigram_eagle3_head(folder / "good", target, wrong=0.0)
    kept = load_file(head / "model.safetensors")
    for name in ("d2t", "t2d"):
        del kept[name]
    kept["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"].clone()
    save_file(kept, head / "model.safetensors")
    config(draft_vocab_size=290)(head)
    return target, head


def write_row(name: str, good: Path) -> Path:
    """The folder of a row's head, beside the good one."""
    folder = good.parent / name.replace(" ", "-").replace("'", "")
    if not folder.exists():
        shutil.copytree(good, folder)
        ROWS[name].edit(folder)
    return folder
