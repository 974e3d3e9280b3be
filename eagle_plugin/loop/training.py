"""The recipe that trains the head further on the captured answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eagle_plugin.atomic_io import write_output
from eagle_plugin.loop.settings import LoopSettings


def training_recipe(settings: LoopSettings, target: Path, head: Path, store: Path) -> dict[str, Any]:
    """The keys of `eagle-plugin train`; docs/loop.md says which settings were compared."""
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
        "eval_tokens": 4000,
        "checkpoint_every": 25,
    }


def write_recipe(settings: LoopSettings, target: Path, head: Path, store: Path, path: Path) -> None:
    """Write the recipe as YAML."""
    values = training_recipe(settings, target, head, store)
    write_output(path, [yaml.safe_dump(values, sort_keys=False)])
