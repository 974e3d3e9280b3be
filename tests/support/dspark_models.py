"""DSpark drafters: those of `dflash_models` with a Markov head, random ones and some that know a target."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from dflash_models import dflash_head, tiny_dflash
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Random, draft_vocabulary, read_config, write_config
from torch import Tensor

RANK = 16


def with_markov(
    folder: Path, w1: Tensor, w2: Tensor, *, anchor: bool, tensors: dict[str, Tensor] | None = None, **config: Any
) -> Path:
    """Make a DFlash drafter one of DSpark, with the keys where published ones have them."""
    kept = read_config(folder)
    options = kept.pop("dflash_config")
    own = {"architectures": ["Qwen3DSparkModel"], "markov_rank": w1.shape[1], "markov_head_type": "vanilla"}
    write_config(folder, **kept | options | own | {"sample_from_anchor": anchor} | config)
    markov = {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2.contiguous()}
    stored = load_file(str(folder / "model.safetensors")) | markov | (tensors or {})
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def tiny_dspark(
    path: str | Path,
    target: str | Path,
    *,
    anchor: bool = True,
    kept: list[int] | None = None,
    confidence: bool = False,
    seed: int = 7,
    **options: Any,
) -> Path:
    """Write a random drafter for `target`, whose Markov head says as much as its layers; kept: its draft vocabulary.

    confidence: with a confidence head. options: of `tiny_dflash`.
    """
    folder, t = tiny_dflash(path, target, seed=seed, **options), read_config(Path(target))
    random, vocab = Random(seed + 1), t["vocab_size"]
    tensors: dict[str, Tensor] = {}
    config: dict[str, Any] = {}
    if kept is not None:
        lm_head = load_file(str(Path(target) / "model.safetensors"))["lm_head.weight"]
        tensors = {"lm_head.weight": lm_head[kept]} | draft_vocabulary(kept, vocab)
        config["draft_vocab_size"] = len(kept)
    if confidence:
        width = t["hidden_size"] + RANK
        tensors |= {"confidence_head.proj.weight": random.normal(1, width, std=0.1)}
        tensors |= {"confidence_head.proj.bias": torch.zeros(1)}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    w1, w2 = random.normal(vocab, RANK, std=1.0), random.normal(len(kept or range(vocab)), RANK, std=0.6)
    return with_markov(folder, w1, w2, anchor=anchor, tensors=tensors, **config)


def dspark_head(
    path: str | Path,
    target: str | Path,
    kept: list[int],
    *,
    wrong: float = 0.0,
    anchor: bool = True,
    own_tables: bool = True,
    seed: int = 5,
    **options: Any,
) -> Path:
    """Write a drafter whose Markov head knows a target of unit embeddings and whose layers say nothing.

    The target's logits after a token, with noise of `wrong`, are the bias after it; so all depends on each node's own
    token, and the lists are those of the target at every level. own_tables, options: as in `dflash_head`.
    """
    folder = dflash_head(path, target, kept, layers=1, own_tables=own_tables, seed=seed, **options)
    lm_head = load_file(str(Path(target) / "model.safetensors"))["lm_head.weight"].float()
    vocab = len(lm_head)
    table = lm_head * math.sqrt(vocab)  # [next, token]: the target's norm makes a unit vector so long
    table = table[kept] if own_tables else table
    table = table + Random(seed + 1).normal(*table.shape, std=wrong)
    silent = {"norm.weight": torch.zeros(vocab)}
    return with_markov(folder, torch.eye(vocab), table, anchor=anchor, tensors=silent)
