"""Targets that bring a prediction layer (MTP, NextN) along, made by hand: dense targets of MiMo's class.

The next token depends on the current one and, a little, on all before it (`bigram_models`). The prediction layer sees
the current token's embedding, noise of its own, and what its attention adds: its drafts are near, and nowhere equal.
"""

from __future__ import annotations

from pathlib import Path

import torch
from bigram_models import HEAD_DIM, HEADS, bigram_target
from safetensors.torch import load_file
from tiny_checkpoints import Random, decoder_layer, read_config, save, write_config
from torch import Tensor


def mimo_target(path: str | Path, *, wrong: float = 0.4, noise: float = 0.05, seed: int = 13) -> Path:
    """Write a float32 target of MiMo's class with one prediction layer.

    wrong: noise in what the layer takes the newest token for; noise: of its attention and MLP.
    """
    path = bigram_target(path, vocab=HEADS * HEAD_DIM, noise=0.02)  # Qwen2 knows no other size of a head
    c = read_config(path)
    c |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    write_config(path, **c)
    tensors = load_file(path / "model.safetensors")
    random, vocab = Random(seed), c["vocab_size"]
    name = "model.mtp_layers.0"
    layer = decoder_layer(random, name, c, vocab, gain=noise)
    token = torch.eye(vocab) + random.normal(vocab, vocab, std=wrong / vocab**0.5)
    layer |= {
        f"{name}.{norm}.weight": torch.ones(vocab) for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    layer[f"{name}.input_proj.weight"] = torch.cat([random.projection(vocab, vocab, noise), token], dim=1)
    for i in range(c["num_hidden_layers"]):
        tensors |= _no_biases(f"model.layers.{i}")
    save(path, tensors | layer | _no_biases(name), torch.float32)
    return path


def _no_biases(layer: str) -> dict[str, Tensor]:
    """What a layer of Qwen2 adds to queries, keys and values."""
    return {f"{layer}.self_attn.{part}_proj.bias": torch.zeros(HEADS * HEAD_DIM) for part in "qkv"}
