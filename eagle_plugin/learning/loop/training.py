"""The recipe that trains the head further on the captured answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.learning.data.rows import read_rows
from eagle_plugin.learning.loop.settings import LoopSettings


def training_recipe(
    settings: LoopSettings, target: Path, head: Path, store: Path, has_val: bool = True
) -> dict[str, Any]:
    """The keys of `eagle-plugin train`; without a row of split val there is nothing to evaluate on as it trains."""
    return {
        "target": str(target),
        "head": {"from": str(head)},
        "data": {"store": str(store)},
        "budget": {"epochs": settings.epochs},
        "batch_tokens": settings.batch_tokens,
        "phases": [{"share": 0.4, "steps": 2}, {"share": 0.6, "steps": 4}],
        "optimiser": {"name": "adamw", "lr": settings.lr, "clip": 1.0, "schedule": "linear", "warm_up": 0.05},
        "loss": {"teacher": "draft"},
        "eval_every": 50,
        "eval_tokens": 4000 if has_val else 0,
        "checkpoint_every": 25,
    }


def write_recipe(settings: LoopSettings, target: Path, head: Path, rows: Path, store: Path, path: Path) -> None:
    """Write the recipe as YAML; rows: what the store was made of. DataError if they cannot be read."""
    has_val = any(row.split == "val" for row in read_rows(rows))
    values = training_recipe(settings, target, head, store, has_val)
    write_output(path, [yaml.safe_dump(values, sort_keys=False)])
