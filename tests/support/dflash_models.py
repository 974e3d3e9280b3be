"""DFlash drafters of Qwen3 layers, written by hand: random ones, and some that know a Markov target.

The block of such a head is the root token and masks; every row attends to keys made of the target's states and to all
rows of the block. A drafter that knows a Markov target follows its most likely text: mask j holds the token that comes
j places after the root.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import PAD, Random, decoder_layer, head_config, read_config, save, write_config


def dflash_config(
    target: dict[str, Any], dtype: torch.dtype, aux_layers: tuple[int, ...], block: int, **values: Any
) -> dict[str, Any]:
    """aux_layers: layers whose output the head reads, counted from 0."""
    own = {
        "model_type": "qwen3",
        "block_size": block,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": PAD, "target_layer_ids": list(aux_layers)},
    }
    return head_config(target, "DFlashDraftModel", dtype) | own | values


def tiny_dflash_head(
    path: str | Path,
    target: str | Path,
    *,
    layers: int = 2,
    block: int = 8,
    aux_layers: tuple[int, ...] = (1, 3, 5),
    seed: int = 7,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random head for `target`; embedding and lm_head are the target's."""
    path, t = Path(path), read_config(Path(target))
    path.mkdir(parents=True, exist_ok=True)
    c = write_config(path, **dflash_config(t, dtype, aux_layers, block, num_hidden_layers=layers))
    random, hidden = Random(seed), c["hidden_size"]
    tensors = {
        "fc.weight": random.projection(hidden, len(aux_layers) * hidden),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
    }
    for i in range(layers):
        tensors |= decoder_layer(random, f"layers.{i}", c, hidden, gain=1.5)
        for part in "qk":
            tensors[f"layers.{i}.self_attn.{part}_norm.weight"] = torch.full((c["head_dim"],), 1.6)
    save(path, tensors, dtype)
    return path
