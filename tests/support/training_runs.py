"""Material for the tests of training: rows of a tiny target with their features, and recipes over them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from eagle_plugin.learning.data import extract
from eagle_plugin.learning.data.rows import TokenRow, format_row
from eagle_plugin.learning.train import command

VOCAB = 512


def write_rows(
    path: Path, count: int, *, seed: int = 0, val_every: int = 6, longest: int = 40, vocab: int = VOCAB
) -> Path:
    """Rows with responses of unequal length; every val_every-th is held out."""
    rng = random.Random(seed)
    lines = []
    for i in range(count):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randrange(2, 12))]
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


def launch_ranks(recipes: list[Path], processes: int = 2) -> None:
    """Train by recipes in so many processes; a run is in the folder of its recipe, named as it is."""
    args = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = Path(__file__).with_name("training_ranks.py")
    paths = os.pathsep.join([str(script.parents[2]), str(script.parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([*args, str(script), *map(str, recipes)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def distance(first: Path, second: Path) -> float:
    """The largest difference of two sets of parameters."""
    ours, theirs = load_file(first), load_file(second)
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


def test_checkpoint_goes_on_with_another_number_of_processes(runs: dict[str, Path], features) -> None:
    run = runs["fsdp"]
    args = [str(run.with_suffix(".yaml")), "--out", str(run)]
    before = (run / "head" / "model.safetensors").read_bytes()
    assert command.main(args) == 0  # one process resumes what two had saved, and exports the same head
    assert (run / "head" / "model.safetensors").read_bytes() == before
