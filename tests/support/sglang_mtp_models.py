"""Targets that bring an MTP (NextN) layer along, made by hand: of MiMo's class, and of larger families.

MiMo's next token depends on the current one and, a little, on all before it (`bigram_models`). The MTP layer
sees the current token's embedding, noise of its own, and what its attention adds: its drafts are near, and nowhere
equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bigram_models import HEAD_DIM, HEADS, bigram_target
from family_models import VOCAB, let_speak, sglang_target, spoken
from multimodal_models import KINDS as MULTIMODAL
from multimodal_models import multimodal_target
from safetensors.torch import load_file
from tiny_checkpoints import Random, decoder_layer, read_config, save, write_config, write_tokenizer
from tiny_targets import BASE, draw_weights
from torch import Tensor


def mimo_target(path: str | Path, *, wrong: float = 0.4, noise: float = 0.05, seed: int = 11) -> Path:
    """Write a float32 target of MiMo's class with one MTP layer.

    wrong: noise in what the layer takes the newest token for; noise: of its attention and MLP.
    """
    size = HEADS * HEAD_DIM  # Qwen2 knows no other size of a head
    path = bigram_target(path, layers=3, vocab=size, noise=0.05, seed=seed)
    c = read_config(path)
    c |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    write_config(path, **c)
    tensors = load_file(path / "model.safetensors")
    random, vocab = Random(seed + 2), c["vocab_size"]
    name = "model.mtp_layers.0"
    layer = decoder_layer(random, name, c, vocab, gain=noise)
    token = torch.eye(vocab) + random.normal(vocab, vocab, std=wrong / vocab**0.5)
    layer |= {
        f"{name}.{norm}.weight": torch.ones(vocab)
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    layer[f"{name}.input_proj.weight"] = torch.cat([random.projection(vocab, vocab, noise), token], dim=1)
    for i in range(c["num_hidden_layers"]):
        tensors |= _no_biases(f"model.layers.{i}")
    save(path, tensors | layer | _no_biases(name), torch.float32)
    return path


def _no_biases(layer: str) -> dict[str, Tensor]:
    """What a layer of Qwen2 adds to queries, keys and values."""
    return {f"{layer}.self_attn.{part}_proj.bias": torch.zeros(HEADS * HEAD_DIM) for part in "qkv"}


# What differs from tiny_targets.BASE in families that family_models.py does not have.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
}
GEMMA_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # whose norms multiply by 1 + weight


def mtp_target(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a tiny random target of a family that says few tokens (`family_models`), with an MTP layer.

    The layer has the weights of a layer of the target with ordinary attention, after a random projection.
    """
    if family in FAMILIES:
        _write_family(folder, family, seed)
    elif family in MULTIMODAL:
        multimodal_target(folder, family, seed)
    else:
        sglang_target(folder, family, seed=seed)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 1
    tensors = load_file(files[0])
    save(folder, tensors | _mtp_layer(tensors, read_config(folder), family, seed), torch.float32)
    return folder


def _mtp_layer(tensors: dict[str, Tensor], config: dict[str, Any], family: str, seed: int) -> dict[str, Tensor]:
    text = config.get("text_config", config)
    layers, hidden = text["num_hidden_layers"], text["hidden_size"]
    copied = next(name.partition("layers.")[0] for name in tensors if ".layers." in name and "visual" not in name)
    # The last layer has ordinary attention, and experts, in every family.
    copied += f"layers.{layers - 1}."
    norm = torch.zeros(hidden) if family in GEMMA_NORMS else torch.ones(hidden)
    random = Random(seed + 5)
    fc = random.projection(hidden, 2 * hidden, 1.4)
    if family == "glm4_moe":
        own = f"model.layers.{layers}."
        first = {"eh_proj.weight": fc, "enorm.weight": norm, "hnorm.weight": norm, "shared_head.norm.weight": norm}
        found = {own + name: values for name, values in first.items()}
    else:
        own = "mtp.layers.0."
        first = {"fc": fc, "pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm, "norm": norm}
        found = {f"mtp.{name}.weight": values for name, values in first.items()}
    found |= {own + name.removeprefix(copied): x for name, x in tensors.items() if name.startswith(copied)}
    return {name: values.clone() for name, values in found.items()}


@torch.no_grad()
def _write_family(folder: Path, family: str, seed: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    printable = write_tokenizer(folder, VOCAB)
    sizes = {"vocab_size": VOCAB, "head_dim": 32, "max_position_embeddings": 1024}
    config = AutoConfig.for_model(family, **BASE | FAMILIES[family] | sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        draw_weights(model)
    let_speak(model, family, spoken(printable))
    model.save_pretrained(folder)
    write_config(folder, **FAMILIES[family] | read_config(folder))
