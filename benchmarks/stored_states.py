"""Measure what states stored in float8 cost: bytes, the teacher's distribution, and a head trained on them.

    python benchmarks/stored_states.py --accept-terms sharegpt [--dialogues 400] [--tokens 200000] [--out out]

The same recorded dialogues are extracted into a store of each form, and a head is trained from scratch on each, with
the same seed and the same order. Then both answer to `eagle-plugin eval` on the held-out sets. The teacher's
distribution is that of the readout over the whole vocabulary at every token: its Kullback-Leibler divergence from the
one of bfloat16 states, in nats, and how often its most likely token is another one. The result is in
out/stored-states.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.choices import resolve_target
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.collect.settings import FORMS
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.train.sources import read_readout

TEACHER_TOKENS = 200_000  # of which distributions are compared


def run(arguments: Sequence[str], console: Console) -> None:
    """One command of `eagle-plugin`, with its progress.

    Raises:
        ServerError: it failed.
    """
    console.print(f"eagle-plugin {' '.join(arguments)}", highlight=False, soft_wrap=True)
    if code := subprocess.run([sys.executable, "-m", "eagle_plugin.cli", *arguments], check=False).returncode:
        raise ServerError(f"`eagle-plugin {arguments[0]}` failed with exit code {code}; its message is above")


def recipe(options: argparse.Namespace, target: Path, store: Path, vocabulary: Path) -> dict[str, Any]:
    """The recipe of `train` on a store."""
    return {
        "target": str(target),
        "head": {"kind": "eagle3", "vocabulary": str(vocabulary)},
        "data": {"store": [str(store)]},
        "budget": {"tokens": options.tokens},
        "batch_tokens": 1024,
        "phases": [{"share": 0.5, "steps": 1}, {"share": 0.5, "steps": 3}],
        "optimiser": {"lr": 1e-3, "clip": 1.0, "schedule": "linear", "warm_up": 0.03},
        "loss": {"teacher": "draft"},
        "eval_tokens": 4000,
        "seed": 0,
    }


@torch.inference_mode()
def compare_teachers(ours: FeatureStore, exact: FeatureStore, target: Path) -> dict[str, float]:
    """The readout of the states of `ours` against that of `exact`, over all tokens, or the first ones."""
    readout = read_readout(target, exact.manifest)
    readout = replace(readout, weight=readout.weight.float())
    others = {entry.id: entry for entry in exact.entries}
    divergence, changed, tokens = 0.0, 0, 0
    for entry in ours.entries:
        if tokens >= TEACHER_TOKENS:
            break
        states = ours.read(entry).last, exact.read(others[entry.id]).last
        a, b = (readout(one.float()).log_softmax(-1) for one in states)
        divergence += float((b.exp() * (b - a)).sum())
        changed += int((a.argmax(-1) != b.argmax(-1)).sum())
        tokens += len(a)
    return {"tokens": tokens, "kl_nats": divergence / tokens, "other_first_token": changed / tokens}


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both stores and both heads; the numbers for stored-states.json."""
    target = resolve_target(options.target, console)
    folder = options.out / "stored-states"
    folder.mkdir(parents=True, exist_ok=True)
    prompts, rows, vocabulary = folder / "prompts.jsonl", folder / "rows.jsonl", folder / "vocabulary.safetensors"
    terms = ["--accept-terms", *options.accept_terms] if options.accept_terms else []
    run(["data", "builtin", "--recorded", "--limit", str(options.dialogues), "--out", str(prompts), *terms], console)
    run(["data", "render", str(prompts), "--target", str(target), "--max-length", "512", "--out", str(rows)], console)
    choice = ["--size", str(options.vocabulary), "--out", str(vocabulary)]
    run(["data", "vocabulary", str(rows), "--target", str(target), *choice], console)
    stores: dict[str, FeatureStore] = {}
    for form in FORMS:
        store, file = folder / f"{form}-store", folder / f"{form}.yaml"
        run(["data", "features", str(rows), "--target", str(target), "--store", str(store), "--states", form], console)
        stores[form] = FeatureStore(store)
        file.write_text(yaml.safe_dump(recipe(options, target, store, vocabulary)))
        run(["train", str(file), "--out", str(folder / form)], console)
    heads = [str(folder / form / "head") for form in FORMS]
    sets = ["--sets", *options.sets, "--prompts", str(options.prompts), "--dtype", "float32"]
    run(["eval", str(target), *heads, *sets, "--json", str(folder / "accept.json")], console)
    found: dict[str, Any] = {}
    for form, store in stores.items():
        size = sum(path.stat().st_size for path in (folder / f"{form}-store").glob("shard-*"))
        found[form] = {"bytes_per_token": round(size / sum(entry.length for entry in store.entries), 1)}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine().model_dump(mode="json"),
        "options": {key: str(value) for key, value in vars(options).items()},
        "stores": found,
        "teacher": compare_teachers(stores["float8"], stores["bfloat16"], target),
        "accept": json.loads((folder / "accept-details.json").read_text()),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(
        prog="benchmarks/stored_states.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m-instruct", help="folder or name (%(default)s)")
    parser.add_argument("--dialogues", type=positive_number, default=400, help="recorded ones (%(default)s)")
    parser.add_argument("--vocabulary", type=positive_number, default=4096, help="of the heads (%(default)s)")
    parser.add_argument("--tokens", type=positive_number, default=200_000, help="that a head sees (%(default)s)")
    parser.add_argument("--sets", nargs="+", default=["mtbench", "gsm8k"], help="held-out sets (%(default)s)")
    parser.add_argument("--prompts", type=positive_number, default=20, help="of each set (%(default)s)")
    parser.add_argument(
        "--accept-terms", nargs="+", metavar="NAME", help="as of `data builtin`: the dialogues are those of sharegpt"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="(%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options, console = parse(argv), Console(stderr=True)

    def work() -> int:
        found = measure(options, console)
        write_output(options.out / "stored-states.json", [json.dumps(found, indent=1), "\n"])
        table = Table("states", "bytes per token")
        for form, one in found["stores"].items():
            table.add_row(form, f"{one['bytes_per_token']:,}")
        Console().print(table)
        teacher = found["teacher"]
        Console().print(
            f"teacher of float8 against bfloat16, {teacher['tokens']:,} tokens: {teacher['kl_nats']:.5f} nats, "
            f"another most likely token at {teacher['other_first_token']:.2%}"
        )
        return 0

    return exit_status("stored-states", console, work)


if __name__ == "__main__":
    raise SystemExit(main())
