"""Heads that stock engines serve, or fail with, each made from one good head by an edit: the rows of a table.

The target says what follows from the current token; the good head knows it, so that a head which is read as it was
meant reaches an accept length near the greatest one, and one that is misread does not.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bigram_models import SHARPNESS, bigram_eagle3_head, bigram_target
from head_edits import Edit, config, drop, put, set_d2t, shards, tensors
from safetensors.torch import load_file, save_file
from tiny_models import tiny_eagle3_head
from torch.nn.functional import pad

AUX = "eagle_aux_hidden_state_layer_ids"
LAYERS = 8
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12]}


@dataclass(frozen=True)
class Row:
    """One head, and what is expected of an engine that gets it."""

    edit: Edit
    vllm: str  # "plugin", "engine", or a phrase of the sentence that ends the start
    sglang: str
    stock_vllm: bool  # whether vLLM alone serves it
    stock_sglang: bool
    right: bool = True  # whether the drafts are those of the good head where the plugin serves
    right_in_sglang: bool = True


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


def aux(*layers: int, sglang: bool = True, vllm: bool = True) -> Edit:
    """Other aux layers, of which the mean is read, named under the keys of these engines."""

    def edit(folder: Path) -> None:
        width = len(load_file(folder / "model.safetensors")["norm.weight"])
        put("fc.weight", torch.cat([torch.eye(width)] * len(layers), 1) / len(layers))(folder)
        inner = {"use_aux_hidden_state": True} | ({AUX: [i - 1 for i in layers]} if sglang else {})
        top = {AUX: list(layers)} if vllm else {}
        config(num_aux_hidden_states=..., eagle_config=inner, **top)(folder)

    return edit


def norms(folder: Path) -> None:
    """The norms of EAGLE-3.1, which keep the length 1 that the states of the good head have."""

    def change(t: dict[str, torch.Tensor]) -> None:
        unit = torch.ones(290) / math.sqrt(290)
        t.update({f"fc_norm.{i}.weight": unit.clone() for i in range(3)} | {"norm.weight": unit})
        t["lm_head.weight"] *= math.sqrt(290)

    _together(tensors(change), config(fc_norm=True, norm_output=True))(folder)


def norm_before_fc(folder: Path) -> None:
    put("input_norm.weight", torch.ones(3 * 290) / math.sqrt(290))(folder)
    config(norm_before_fc=True)(folder)


def norm_before_residual(folder: Path) -> None:
    """The residual is the normed state, twice as long as the state: half of it is what the good head has."""

    def change(t: dict[str, torch.Tensor]) -> None:
        t["fc.weight"] *= 2
        t["midlayer.hidden_norm.weight"] /= math.sqrt(290)
        t["midlayer.self_attn.v_proj.weight"][:, 290:] *= math.sqrt(290)

    _together(tensors(change), config(norm_before_residual=True))(folder)


def window(folder: Path) -> None:
    """A head that attends to all tokens alike, and so is right only where it sees the newest one alone."""
    names = [f"midlayer.self_attn.{part}_proj.weight" for part in "qk"]
    tensors(lambda t: [t[name].zero_() for name in names])(folder)
    config(layer_types=["sliding_attention"], sliding_window=1)(folder)


def wide(folder: Path) -> None:
    """The good head in twice as many dimensions, of which the second half is always 0."""

    def change(t: dict[str, torch.Tensor]) -> None:
        for name, tensor in t.items():
            if "norm" in name:
                t[name] = torch.ones(580) / math.sqrt(2)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                t[name] = torch.cat([pad(half, (0, 290)) for half in tensor.chunk(2, 1)], 1)
            elif name.endswith(("o_proj.weight", "down_proj.weight")) or name == "fc.weight":
                t[name] = pad(tensor, (0, 0, 0, 290))
            else:
                t[name] = pad(tensor, (0, 290))
        t["embed_tokens.weight"] = pad(torch.eye(290), (0, 290))

    _together(tensors(change), config(hidden_size=580, target_hidden_size=290))(folder)


def second_layer(*names: str) -> Edit:
    """A second layer that adds nothing, whose first norm has these names."""

    def change(t: dict[str, torch.Tensor]) -> None:
        width = len(t["norm.weight"])
        for name in [name for name in t if name.startswith("midlayer.")]:
            columns = width if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else None
            made = torch.zeros_like(t[name])[..., :columns].contiguous()
            t[name.replace("midlayer", "layers.1")] = torch.ones(width) if "norm" in name else made
        for name in ("hidden_norm", "input_layernorm"):
            if name not in names:
                del t[f"layers.1.{name}.weight"]

    return _together(tensors(change), config(num_hidden_layers=2))


def qkv_biases(folder: Path) -> None:
    rows = {name: len(t) for name, t in load_file(folder / "model.safetensors").items() if "self_attn" in name}
    tensors(lambda t: t.update({n.replace("weight", "bias"): torch.zeros(size) for n, size in rows.items()}))(folder)
    config(attention_bias=True)(folder)


def qk_norms(folder: Path) -> None:
    """A layer of Qwen3, whose queries and keys have norms: the head's own are equal in all columns, and stay so."""
    size = json.loads((folder / "config.json").read_text())["head_dim"]
    made = {f"midlayer.self_attn.{part}_norm.weight": SHARPNESS * torch.ones(size) for part in "qk"}
    tensors(lambda t: t.update(made))(folder)
    config(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")(folder)


def rope(**options: Any) -> Edit:
    return config(rope_scaling=options, rope_parameters=options | {"rope_theta": 10000.0})


def as_type(dtype: torch.dtype) -> Edit:
    return tensors(lambda t: t.update({n: x.to(dtype) for n, x in t.items() if x.is_floating_point()}))


def with_prefix(prefix: str) -> Edit:
    return tensors(lambda t: [t.update({prefix + name: t.pop(name)}) for name in list(t) if name != "lm_head.weight"])


def without_token_0(dtype: torch.dtype) -> Edit:
    """A draft vocabulary of all tokens but the first, which nobody says, with a table of this type."""

    def change(t: dict[str, torch.Tensor]) -> None:
        known = torch.arange(290) > 0
        t.update({"lm_head.weight": t["lm_head.weight"][1:].clone()}, d2t=torch.ones(289, dtype=dtype), t2d=known)

    return _together(tensors(change), config(draft_vocab_size=289))


def embedding(scale: float) -> Edit:
    """An embedding of its own: `scale` times the target's, in another order."""
    return put("embed_tokens.weight", scale * torch.eye(290).roll(int(scale != 1), 0))


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
    "tied beside an own lm_head": Row(
        config(tie_word_embeddings=True), "plugin", "plugin", True, True, right_in_sglang=False
    ),
    "vLLM's key of aux layers": Row(config(**{AUX: [2, 4, 6]}), "plugin", "plugin", True, True),
    "SGLang's key of aux layers": Row(
        config(eagle_config={"use_aux_hidden_state": True, AUX: [1, 3, 5]}), "plugin", "plugin", True, True
    ),
    "the output of the last layer": Row(
        config(**{AUX: [4, 6, LAYERS]}), "plugin", "plugin", True, True
    ),
    "narrower than the target": Row(narrow, "plugin", "plugin", True, True, right=False, right_in_sglang=False),
    "wider than the target": Row(wide, "plugin", "plugin", True, True),
    "four aux layers": Row(aux(1, 2, 4, 6), "plugin", "plugin", True, True),
    "four aux layers under vLLM's key alone": Row(
        aux(1, 2, 4, 6, sglang=False), "plugin", "fc.weight of shape", False, False
    ),
    "one aux layer": Row(aux(4), "plugin", "plugin", True, True),
    "the embedding as an aux layer": Row(aux(0, 4, 6), "plugin", "plugin", True, True),
    "no lm_head beside a draft vocabulary": Row(
        _together(without_token_0(torch.int64), drop("lm_head.weight")),
        "plugin", "not lm_head.weight", True, False, right=False,
    ),
    "norms of EAGLE-3.1": Row(norms, "plugin", "plugin", True, True),
    "one norm before fc": Row(norm_before_fc, "plugin", "plugin", True, True),
    "norm_before_residual": Row(norm_before_residual, "plugin", "plugin", True, True, right_in_sglang=False),
    "a window of one token": Row(window, "plugin", "plugin", True, True),
    "the same head without its window": Row(
        _together(window, config(layer_types=...)), "plugin", "plugin", True, True, right=False, right_in_sglang=False
    ),
    "two layers": Row(second_layer("hidden_norm", "input_layernorm"), "plugin", "plugin", True, True),
    "a window in one of two layers": Row(
        _together(
            second_layer("hidden_norm", "input_layernorm"),
            config(layer_types=["sliding_attention", "full_attention"], sliding_window=64),
        ),
        "plugin", "plugin", False, True,
    ),
    "biases of q, k, v": Row(qkv_biases, "plugin", "plugin", True, True),
    "norms of q and k": Row(qk_norms, "plugin", "is not a Llama draft head", True, False),
    "YaRN": Row(rope(**YARN), "plugin", "plugin", True, True),
    "Llama 3's rotary positions": Row(rope(**LLAMA3), "plugin", "plugin", True, True),
    "rotary positions of images": Row(rope(**MROPE), "plugin", "plugin", True, True),
    "float16 weights": Row(as_type(torch.float16), "plugin", "plugin", True, True),
    "bfloat16 weights": Row(as_type(torch.bfloat16), "plugin", "plugin", True, True),
    "an int32 table": Row(without_token_0(torch.int32), "plugin", "plugin", True, True),
    "names after model.": Row(with_prefix("model."), "for which vLLM's class", "plugin", False, True),
    "names after draft_model.": Row(with_prefix("draft_model."), "no fc.weight", "not fc.weight", False, False),
    "two files with an index": Row(shards, "plugin", "plugin", True, True),
    "an embedding equal to the target's": Row(embedding(1), "plugin", "plugin", True, True),
    "an embedding unlike the target's": Row(embedding(2), "plugin", "plugin", True, True, right=False),
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
