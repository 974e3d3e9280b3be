"""Tiny targets with layers for multi-token prediction (MTP) in their checkpoints, as they lie on the hub."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bigram_models
import torch
from family_models import WINDOW, family_head, family_target
from multimodal_models import KINDS as MULTIMODAL
from multimodal_models import multimodal_target
from safetensors import safe_open
from tiny_checkpoints import Random, decoder_layer, read_config, save, write_config
from tiny_models import confused
from torch import Tensor

Tensors = dict[str, Tensor]
VOCAB = 320  # of a bigram target: Qwen2's layers have no head_dim of their own, and 5 heads of 64 make 320


def read_tensors(folder: Path) -> Tensors:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def mimo_target(folder: Path, *, wrong: float = 0.2, noise: float = 0.004, seed: int = 11) -> Path:
    """Write a bigram target of MiMo's class, whose MTP layer is right but after a share `wrong` of the tokens.

    The layer's state is the unit vector of the newest token, as the target's is, and a little of what it attends to and
    of the state before; the shared output layer knows what follows.
    """
    target = bigram_models.bigram_target(folder, layers=3, vocab=VOCAB, noise=noise, seed=seed)
    config, tensors = read_config(target), read_tensors(target)
    width, random = config["hidden_size"], Random(5)
    inner = config["num_attention_heads"] * config["head_dim"]
    # transformers knows no MiMo: on the hub its configuration is a file of Python beside the weights.
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    layer = decoder_layer(random, "model.mtp_layers.0", config, width, gain=0.0)
    layer["model.mtp_layers.0.self_attn.o_proj.weight"] = random.normal(width, inner, std=0.001)
    projection = torch.cat([0.1 * torch.eye(width), confused(width, wrong, 3)], dim=1) / math.sqrt(width)
    norms = dict.fromkeys(("token_layernorm", "hidden_layernorm", "final_layernorm"), torch.ones(width))
    tensors |= layer | {f"model.mtp_layers.0.{name}.weight": value.clone() for name, value in norms.items()}
    tensors["model.mtp_layers.0.input_proj.weight"] = projection
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]))
    write_config(target, **config)
    save(target, tensors, torch.float32)
    return target


# Families with MTP layers alone, by the model_type of transformers: what differs from `tiny_targets.BASE`.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "exaone_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "sliding_window": WINDOW,
        "num_nextn_predict_layers": 1,
    },
}
_OF_QWEN = "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
# By the model_type of the text model: where the layer lies ({n}: after the target's last), and its other tensors, the
# projection first.
_NAMES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "glm4_moe": ("model.layers.{n}", "model.layers.{n}", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
    **dict.fromkeys(
        ("exaone_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        ("mtp.layers.0", "mtp", _OF_QWEN),
    ),
}


def mtp_target(folder: Path, family: str) -> Path:
    """Write a target of MiMo's class, of one of FAMILIES or of Qwen's, with an MTP layer."""
    if family == "mimo":
        return mimo_target(folder)
    if family in MULTIMODAL:
        return add_mtp_layer(multimodal_target(folder, family))
    return add_mtp_layer(family_target(folder, family, **FAMILIES.get(family, {})))


def add_mtp_layer(target: Path) -> Path:
    """Add an MTP layer to the checkpoint of a target of FAMILIES or of Qwen's: a copy of its last layer, under random
    norms and a random projection, which is right now and then."""
    config, tensors = read_config(target), read_tensors(target)
    text = config.get("text_config", config)
    kind, count, width, random = text["model_type"], text["num_hidden_layers"], text["hidden_size"], Random(9)
    layer, rest, (projection, *norms) = (_formatted(part, count) for part in _NAMES[kind])
    layers = "model.language_model.layers" if "text_config" in config else "model.layers"
    last, dense = f"{layers}.{count - 1}.", f"{layers}.0."
    for name, values in list(tensors.items()):
        # The experts of ExaOne's are the target's alone: its MTP layer has one MLP.
        source = dense if kind == "exaone_moe" and ".mlp." in name else last
        if name.startswith(source):
            tensors[f"{layer}.{name.removeprefix(source)}"] = values.clone()
    tensors[f"{rest}.{projection}.weight"] = random.projection(width, 2 * width)
    for name in norms:
        tensors[f"{rest}.{name}.weight"] = 1.0 + random.normal(width, std=0.3)
    if kind.startswith("qwen3_5"):
        text["mtp_num_hidden_layers"] = 1
    elif kind == "qwen3_next":
        config["num_nextn_predict_layers"] = 1
    write_config(target, **config)
    save(target, tensors, torch.float32)
    return target


def family_drafter(folder: Path, target: Path, kind: str) -> Path:
    """A head of a kind for such a target, as `family_head`; of the kind "mtp" the target itself, with an MTP layer."""
    return add_mtp_layer(target) if kind == "mtp" else family_head(folder, target, kind)


def _formatted(part: Any, count: int) -> Any:
    return part.format(n=count) if isinstance(part, str) else part
