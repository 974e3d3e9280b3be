"""A small job over a tiny target: its YAML, and stages that only write their file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_plugin.learning.jobs import runner
from eagle_plugin.learning.jobs.watch import Watch

RUN = {"budget": {"updates": 8}, "batch_tokens": 128, "phases": [{"steps": 1}], "eval_tokens": 0}
STAGES = ("prompts", "answers of the target", "vocabulary", "features of generated rows", "train head")


def write_recipe(folder: Path, target: Path, **keys: Any) -> Path:
    """A recipe over twelve questions, with `keys` over it."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = [{"messages": [{"role": "user", "content": f"Why is the number {k} blue?"}]} for k in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    values: dict[str, Any] = {
        "target": str(target),
        "prompts": {"files": [str(folder / "chats.jsonl")], "privacy": "off"},
        "generate": {"max_tokens": 24, "concurrency": 1, "temperatures": [0.0], "endpoints": ["http://127.0.0.1:9"]},
        "vocabulary": 64,
        "train": {"head": dict(RUN)},
        "evaluate": [],
        "benchmark": False,
        "package": False,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values | keys))
    return path


class PretendedStages:
    """Replaces the sub-commands: a stage writes its file. ran: their names. during: called in the middle of each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.during: Callable[[str, Watch], None] = lambda name, watch: None
        patch.setattr(runner, "call", self._call)
        patch.setattr(runner, "_endpoint", lambda *_: contextlib.nullcontext([]))

    def _call(self, args: Sequence[str], name: str, log: Path, watch: Watch, module: str | None = None) -> None:
        self.ran.append(name)
        self.during(name, watch)
        if watch.stops():
            raise runner.StopRequested
        option = next(option for option in ("--out", "--store", "--json") if option in args)
        output = Path(args[list(args).index(option) + 1])
        if option == "--store":
            output = output / "manifest.json"
        if args[0] == "train":
            output = output / "head" / "model.safetensors"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("{}")
