"""Heads of every kind as training would leave them, and their checkpoints as other projects would write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.draft_head import DraftHead

Weights = dict[str, Tensor]


@torch.no_grad()
def trained_head(kind: Any, target: Path, seed: int = 0, **options: Any) -> DraftHead:
    """A new head whose every trainable parameter has moved, norms too."""
    head = new_head(kind, target, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.requires_grad:
            scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return head


def rewrite(
    source: Path,
    folder: Path,
    config: Callable[[dict[str, Any]], dict[str, Any]] = lambda c: c,
    weights: Callable[[Weights], Weights] = lambda w: w,
) -> Path:
    """A checkpoint changed by functions of its config.json and its tensors, without our manifest."""
    shutil.copytree(source, folder)
    (folder / "eagle_plugin.json").unlink(missing_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text()))))
    save_file(weights(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def rename(weights: Weights, old: str, new: str) -> Weights:
    return {name.replace(old, new): tensor for name, tensor in weights.items()}


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


@torch.no_grad()
def run(head: DraftHead, tokens: Tensor, features: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """State and logits of a head over one sequence of verified rows."""
    positions = torch.arange(len(tokens)) if positions is None else positions
    state, _ = head(head.embed(tokens), head.fuse(features), positions, causal(len(tokens)))
    return state, head.logits(state)
