"""Edits of a head's checkpoint folder, each a function of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Edit = Callable[[Path], object]


def config(**values: Any) -> Edit:
    """Change keys of config.json; ... removes one."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        kept = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in kept.items() if v is not ...}))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Change the dict of tensors in place."""

    def edit(folder: Path) -> None:
        loaded = load_file(folder / "model.safetensors")
        change(loaded)
        save_file(loaded, folder / "model.safetensors")

    return edit


def drop(*names: str) -> Edit:
    return tensors(lambda t: [t.pop(name) for name in names])


def put(name: str, value: torch.Tensor) -> Edit:
    return tensors(lambda t: t.update({name: value}))


def shards(folder: Path) -> None:
    """Split model.safetensors into two files with an index."""
    loaded = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(loaded)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: loaded[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def d2t(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return tensors(lambda t: t.update(d2t=change(t["d2t"])))


def set_d2t(index: int, value: int) -> Edit:
    def change(table: torch.Tensor) -> torch.Tensor:
        table = table.clone()
        table[index] = value
        return table

    return d2t(change)


def rename(old: str, new: str) -> Edit:
    return tensors(lambda t: [t.update({k.replace(old, new, 1): t.pop(k)}) for k in list(t) if k.startswith(old)])


def with_mask(head: Path, **keys: object) -> None:
    """Make an EAGLE-3 head's folder that of a P-EAGLE head."""
    tensors(lambda t: t.update(mask_hidden=t["fc.weight"][:1].clone()))(head)
    config(mask_token_id=3, **keys)(head)
