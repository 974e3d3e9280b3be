"""Heads of each kind, trained from the target on the same tokens: what one pass over masks gives up, and what a block
whose rows see each other gains over a causal one.

    python benchmarks/one_pass.py --store out/data/features/generated --vocabulary out/data/vocabulary.safetensors

Trains with `eagle-plugin train`, measures with `eagle-plugin eval` at temperature 0, and writes out/one_pass.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.learning.evaluate import eval_command
from eagle_plugin.learning.train import command

LEVELS = 4  # of every head
HEADS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {"kind": "eagle3"},
    "P-EAGLE": {"kind": "peagle", "layers": 2},
    "DFlash": {"kind": "dflash", "layers": 2},
    "DFlash, causal": {"kind": "dflash", "layers": 2, "causal": True},
}


def recipe(options: argparse.Namespace, head: dict[str, Any]) -> dict[str, Any]:
    """Of one head; only `head` differs."""
    mask = {} if head["kind"] == "eagle3" else {"mask_token_id": options.mask_token}
    return {
        "target": options.target,
        "head": head | mask | {"vocabulary": str(options.vocabulary)},
        "data": {"store": options.store},
        "budget": {"tokens": options.tokens},
        "batch_tokens": 256,  # many updates count most in short trainings
        "phases": [{"steps": LEVELS}],
        "optimiser": {
            "lr": options.lr,
            "lm_head_lr": options.lr / 3,
            "clip": 1.0,
            "schedule": "linear",
            "warm_up": 0.03,
        },
        "loss": {"teacher": "draft", "columns": 3072},
        "eval_tokens": 2000,
        "eval_every": 500,
        "seed": 0,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command; a run that was stopped goes on where it was."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"tokens": options.tokens, "levels": LEVELS, "prompts per set": options.prompts}
    for name, head in HEADS.items():
        run = options.out / name.lower().replace(", ", "-")
        run.with_suffix(".yaml").write_text(yaml.safe_dump(recipe(options, head)))
        if code := command.main([str(run.with_suffix(".yaml")), "--out", str(run)]):
            return code
        state = json.loads(max((run / "checkpoints").glob("update-*")).joinpath("state.json").read_text())
        measured = run / "eval.json"
        asked = ["--prompts", str(options.prompts), "--tokens", "96", "--temperatures", "0", "--json", str(measured)]
        eval_command.main([options.target, str(run / "head"), *asked])
        details = json.loads(measured.with_name("eval-details.json").read_text())
        found[name] = {
            "head": head,
            "training seconds": round(state["seconds"]),
            "accept length": details["head"]["all"],
        }
        write_output(options.json, [json.dumps(found, indent=1), "\n"], "name another file with --json")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(prog="benchmarks/one_pass.py", description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="folder or name (%(default)s)")
    parser.add_argument("--store", required=True, help="features of the target's answers")
    parser.add_argument("--vocabulary", type=Path, required=True, help="draft vocabulary of all heads")
    parser.add_argument("--mask-token", type=int, default=16, help="an unused token of the target (%(default)s)")
    parser.add_argument("--tokens", type=positive_number, default=60_000, help="of training per head (%(default)s)")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate of all heads (%(default)s)")
    parser.add_argument("--prompts", type=positive_number, default=10, help="of each held-out set (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/one-pass"), help="folder of the runs (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/one_pass.json"), help="(%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
