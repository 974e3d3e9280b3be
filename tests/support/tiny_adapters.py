"""A small LoRA adapter on disk, strong enough to change the text of a tiny target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_checkpoints import read_config


def write_adapter(folder: Path, target: Path, *, rank: int = 4, seed: int = 3) -> Path:
    """Write an adapter of every layer's query and value projections into `folder`, a new one; returns `folder`."""
    folder.mkdir()
    config = read_config(target)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * dim, "v_proj": config["num_key_value_heads"] * dim}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    return _write(folder, tensors, rank, list(sizes))


@torch.no_grad()
def merge_adapter(folder: Path, model: Any, layers: Sequence[str], *, rank: int = 4, seed: int = 3) -> Path:
    """Add an adapter to the linear layers of these names of a model of transformers, and write it into `folder`."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in layers:
            columns, rows = layer.weight.shape
            first, second = (torch.randn(*size, generator=generator) / 2 for size in ((rank, rows), (columns, rank)))
            layer.weight += second @ first
            prefix = f"base_model.model.{name}"
            tensors |= {f"{prefix}.lora_A.weight": first, f"{prefix}.lora_B.weight": second}
    return _write(folder, tensors, rank, layers)


def _write(folder: Path, tensors: dict[str, torch.Tensor], rank: int, layers: Sequence[str]) -> Path:
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(layers)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
