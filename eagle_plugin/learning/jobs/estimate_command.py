"""`eagle-plugin optimize estimate`: what a job will take, before anything is downloaded or computed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle_plugin.common.command_line import positive_number, positive_real
from eagle_plugin.common.devices import check_device, default_device, fast_dtype
from eagle_plugin.common.recipes import read_yaml
from eagle_plugin.learning.jobs.job_file import parse_job
from eagle_plugin.learning.jobs.recipe import JobError
from eagle_plugin.models.shipped import recipe_file

PROMPT_TOKENS = 64
SIDE, COPIED = 1024, 64 << 20  # of the matrices that are multiplied, and bytes that are copied, to measure this machine
SECONDS = 0.3  # of either
EPILOG = """\
examples:
  eagle-plugin optimize estimate smollm2-135m-instruct
  eagle-plugin optimize estimate RECIPE.yaml --dialogues 1000000 --devices 8 --tflops 400 --bandwidth 3000
  eagle-plugin optimize estimate RECIPE.yaml --rows out/head/generated.jsonl --json
  eagle-plugin optimize estimate --known-targets

Only config.json of the target and of the head is read, no weights. `exact` stats are counted, `derived` ones follow
from those that are given, and `rough` ones are rules of thumb (docs/scale.md). --tflops and --bandwidth are what one
device reaches, which is less than its maker says; without them this machine is measured for a second.
"""


def add_estimate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set one key of the recipe")
    parser.add_argument("--dialogues", type=positive_number, metavar="N", help="how many (default: as the recipe says)")
    parser.add_argument(
        "--prompt-tokens",
        type=positive_number,
        default=PROMPT_TOKENS,
        metavar="N",
        help="mean of a prompt (%(default)s)",
    )
    parser.add_argument(
        "--answer-tokens", type=positive_number, metavar="N", help="mean of an answer (default: the recipe's longest)"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="token rows that are there: count these")
    parser.add_argument("--devices", type=positive_number, default=1, metavar="N", help="that share the work (1)")
    parser.add_argument("--tflops", type=positive_real, metavar="X", help="10^12 operations per second of a device")
    parser.add_argument("--bandwidth", type=positive_real, metavar="X", help="GB per second of a device's memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="kind of the devices (default: as here)")
    parser.add_argument("--known-targets", action="store_true", help="print bytes per token of known targets, and end")
    parser.add_argument("--json", action="store_true", help="print all stats as JSON")


def run_estimate(arguments: argparse.Namespace) -> int:
    """Print the table, or JSON.

    Raises:
        UserError: the recipe is wrong, or does not say how much there is of something.
    """
    from eagle_plugin.learning.jobs.estimate import Asked, estimate, known_targets

    if arguments.known_targets:
        rows = [
            (name, f"{hidden:,}", f"{layers}", aux, *(f"{width:,.0f}" for width in widths), *map(_of_a_billion, widths))
            for name, hidden, layers, aux, widths in known_targets()
        ]
        names = ("target", "hidden size", "layers", "aux layers", "bytes per token", "float8", "10^9 tokens", "float8")
        _print_columns([names, *rows])
        return 0
    if arguments.recipe is None:
        raise JobError("an estimate needs a recipe; name its YAML file, or give --known-targets")
    path = recipe_file(arguments.recipe)
    job = parse_job(read_yaml(path, JobError), arguments.set, str(path))
    device = arguments.device or default_device()
    measured: dict[str, float] = {}
    if arguments.tflops is None or arguments.bandwidth is None:
        measured = measure_device(check_device(device))
    asked = Asked(
        dialogues=arguments.dialogues,
        prompt_tokens=arguments.prompt_tokens,
        answer_tokens=arguments.answer_tokens,
        rows=arguments.rows,
        tflops=arguments.tflops or measured["tflops"],
        bandwidth=arguments.bandwidth or measured["bandwidth"],
        devices=arguments.devices,
        device=device,
    )
    stats = estimate(job, asked)
    if arguments.json:
        print(json.dumps({"stats": {one.key: one._asdict() for one in stats}, "measured_here": measured}, indent=1))
        return 0
    _print_columns([(one.text, _shown(one.value, one.unit), one.how) for one in stats])
    if measured:
        print(f"measured here: {measured['tflops']:.2f} TFLOP/s, {measured['bandwidth']:.1f} GB/s")
    return 0


def _of_a_billion(width: float) -> str:
    return f"{width / 1e3:,.1f} TB"


def measure_device(device: str) -> dict[str, float]:
    """What one product of matrices and one copy reach here: 10^12 operations and 10^9 bytes per second."""
    import torch

    dtype = torch.bfloat16 if fast_dtype(device) == "bfloat16" else torch.float32
    one = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    product = _per_second(lambda: torch.mm(one, one), device) * 2 * SIDE**3
    return {"tflops": product / 1e12, "bandwidth": _per_second(lambda: goal.copy_(source), device) * 2 * COPIED / 1e9}


def _per_second(call: Callable[[], object], device: str) -> float:
    """How often per second a call ends."""
    import torch

    call()
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < SECONDS:
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        count += 1
    return count / spent


def _shown(value: float, unit: str) -> str:
    if unit == "h":
        return f"{value:,.2f} h"
    if unit == "":
        return f"{value:,.0f}" if value == round(value) or value >= 1000 else f"{value:,.1f}"
    for factor, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.1f} {name}{unit}"
    return f"{value / 1e3:,.1f} k{unit}"


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows whose first column is text, and whose numbers are on the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
