"""Material for the tests of training: rows of a tiny target with their features, and recipes over them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from eagle_plugin.learning.data import extract
from eagle_plugin.learning.data.rows import TokenRow, format_row
from eagle_plugin.learning.train import command

VOCAB = 512


def write_rows(path: Path, count: int, *, seed: int = 0, val_every: int = 6, longest: int = 40) -> Path:
    """Rows with responses of unequal length; every val_every-th is held out."""
    rng = random.Random(seed)
    lines = []
    for i in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 12))]
        start = rng.randrange(3, 100)
        response = [3 + (start + 7 * j) % 97 for j in range(rng.randrange(3, longest))]  # something to learn
        split = "val" if i % val_every == 0 else "train"
        lines.append(format_row(TokenRow(f"{seed}-{i:04d}", "test", prompt, response, "stop", split)))
    path.write_text("".join(lines))
    return path


def extract_features(rows: Path, target: Path, store: Path, **options: str) -> Path:
    """Run the target over the rows into a store."""
    args = [str(rows), "--target", str(target), "--store", str(store), "--dtype", "float32"]
    for key, value in options.items():
        args += [f"--{key.replace('_', '-')}", value]
    assert extract.main(args) == 0
    return store


def recipe(target: Path, store: Path | list[Any], **keys: Any) -> dict[str, Any]:
    """A recipe of a few updates on one thread in float32, with keys over it."""
    stores = [str(store)] if isinstance(store, Path) else store
    values: dict[str, Any] = {
        "target": str(target),
        "head": {"kind": "eagle3"},
        "data": {"store": stores},
        "optimiser": {"lr": 1e-3},
        "phases": [{"steps": 2}],
        "budget": {"updates": 6},
        "batch_tokens": 200,
        "eval_tokens": 200,
        "eval_every": 3,
        "checkpoint_every": 3,
        "log_every": 2,
        "threads": 1,
        "dtype": "float32",
        "device": "cpu",
    }
    return values | keys


def write_recipe(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def run_training(folder: Path, name: str, values: dict[str, Any], *overrides: str) -> Path:
    """Train by the command in this process; returns the run's folder."""
    file = write_recipe(folder / f"{name}.yaml", values)
    args = [word for override in overrides for word in ("--set", override)]
    assert command.main([str(file), "--out", str(folder / name), *args]) == 0
    return folder / name


def weights(run: Path) -> bytes:
    """The exported weights."""
    return (run / "head" / "model.safetensors").read_bytes()


def newest(run: Path, file: str = "parameters.safetensors") -> Path:
    """A file of the newest checkpoint."""
    return sorted((run / "checkpoints").glob("update-*"))[-1] / file
