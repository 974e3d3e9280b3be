"""Tiny targets with layers for multi-token prediction (MTP) in their checkpoints, as they lie on the hub."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bigram_models
import torch
from safetensors import safe_open
from tiny_checkpoints import Random, decoder_layer, read_config, save, write_config
from tiny_models import confused
from torch import Tensor

Tensors = dict[str, Tensor]
VOCAB = 320  # of a bigram target: Qwen2's layers have no head_dim of their own, and 5 heads of 64 make 320


def read_tensors(folder: Path) -> Tensors:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def mimo_target(folder: Path, *, wrong: float = 0.2, noise: float = 0.004) -> Path:
    """Write a bigram target of MiMo's class, whose MTP layer is right but after a share `wrong` of the tokens.

    The layer's state is the unit vector of the newest token, as the target's is, and a little of what it attends to and
    of the state before; the shared output layer knows what follows.
    """
    target = bigram_models.bigram_target(folder, vocab=VOCAB, noise=noise)
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
