"""`eagle-plugin eval`: the accept length of one or more heads on held-out prompts, without an engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from eagle_plugin.common.allocator import reuse_memory
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.common.device_memory import device_for, is_out_of_memory, naming_lack
from eagle_plugin.common.devices import check_device, fast_dtype
from eagle_plugin.common.progress import ProgressBars, report_progress
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.data.rows import DataError, TokenRow
from eagle_plugin.learning.data.sources.sets import SETS
from eagle_plugin.learning.data.store.features import load_target
from eagle_plugin.learning.data.target_files import load_tokenizer
from eagle_plugin.learning.evaluate.measure import (
    CPU_STEPS,
    LEAST_STEPS,
    MOST_STEPS,
    Responses,
    check_tree_reading,
    evaluate,
    shapes_of,
)
from eagle_plugin.learning.evaluate.responses import POOLED, held_out_rows, responses_at, set_rows
from eagle_plugin.learning.evaluate.stats import AcceptCounts, gain, summarize
from eagle_plugin.models import head_folder, target_folder
from eagle_plugin.policy.shapes import GPU_DEPTH

DESCRIPTION = """\
Measure the accept length of draft heads (tokens per round, the bonus token
included) on responses of the target: with a chain of as many drafts as --steps
says, and with a tree of 16 nodes (the root included, as many levels, 4 children
per node). At temperature 0 rounds follow each other as in a server. Above 0
drafts are made at every fourth token: trees with the noise of the target's
draws, as they are served (one draw per token), chains of speculative sampling
(an expectation).
"""
EPILOG = """\
examples:
  eagle-plugin eval smollm2-135m-instruct HEAD                       three held-out sets, 40 prompts each
  eagle-plugin eval TARGET OLD NEW --sets gsm8k --temperatures 0     is the new head better than the old one?
  eagle-plugin eval TARGET HEAD --rows rows.jsonl                    your own traffic: its val rows, by source

A target with recurrent layers cannot read a draft tree in one forward: it is measured at temperature 0 alone.
The target's responses are generated once and kept in the cache (EAGLE_CACHE_DIR). Intervals are of 95 %, by bootstrap
over the prompts; the gain is over the first head, on the same prompts.

--json writes the last head's accept lengths as plain numbers, {"gsm8k": {"chain4_t0": ..., "tree16_t0": ...}}, with the
draft steps in the name of the chain, and
FILE-details.json in the same folder has those of all heads with their intervals and the acceptance of each position.
"""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ANOTHER_FILE = "name another file with --json"
WIDTH = 110  # of the table in a file
Results = dict[str, dict[str, list[AcceptCounts]]]  # head -> name such as tree16_t0 -> one entry per prompt


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(
        prog="eagle-plugin eval",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("target", metavar="TARGET", help="folder of the target, or a name of `models list`")
    parser.add_argument("heads", metavar="HEAD", nargs="+", help="folders of draft heads, or names of `models list`")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS), help="held-out sets (all)")
    source.add_argument("--rows", type=Path, metavar="FILE", help="token rows of `eagle-plugin data generate`")
    parser.add_argument(
        "--prompts", type=positive_number, default=40, metavar="N", help="prompts of each set (%(default)s)"
    )
    parser.add_argument(
        "--tokens", type=positive_number, default=128, metavar="N", help="longest response (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="K",
        help=f"draft steps of chain and tree (default: {GPU_DEPTH} on a GPU, as servers have there, else {CPU_STEPS})",
    )
    parser.add_argument("--temperatures", type=_temperature, nargs="+", default=[0.0, 1.0], metavar="T", help="(0 1)")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of target and heads (bfloat16; float32 on a CPU without instructions for bfloat16)",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU with enough free memory)")
    parser.add_argument("--seed", type=int, default=0, help="of responses and drafts at temperatures above 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the accept lengths to this file")
    return parser.parse_args(argv)


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text} is not a temperature from 0 to 10")
    return value


def _steps(text: str) -> int:
    value = int(text)
    if not LEAST_STEPS <= value <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of draft steps from {LEAST_STEPS} to {MOST_STEPS}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the heads and print one table; returns 0, raises UserError for anything refused."""
    options = parse(argv)
    device = None if options.device is None else check_device(options.device)
    target_dir = target_folder(options.target)
    paths = [head_folder(name) for name in options.heads]
    options.device = device or device_for([target_dir, *paths])
    options.dtype = options.dtype or fast_dtype(options.device)
    options.steps = options.steps or (CPU_STEPS if torch.device(options.device).type == "cpu" else GPU_DEPTH)
    reuse_memory()
    with _bars(Console(stderr=True)) as bar, naming_lack(options.device):
        heads = {
            _name(path, paths): load_any_head(path, target_dir, DTYPES[options.dtype]).to(options.device)
            for path in paths
        }
        rows = _rows(options, target_dir)
        results = measure(target_dir, heads, rows, options, bar)
    document = {head: _stats(counts) for head, counts in results.items()}
    table = _table(results, document, options.temperatures, options.steps)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    if options.json:
        _write(options.json, document)
    return 0


def measure(
    target_dir: Path,
    heads: dict[str, DraftHead],
    rows: list[TokenRow],
    options: argparse.Namespace,
    bar: Callable[[str, int], Callable[[int], None]],
) -> Results:
    """The counts of every head at every temperature; the target reads each response once for all heads."""
    results: Results = {name: {} for name in heads}
    aux_layers = sorted({layer for head in heads.values() for layer in head.aux_layers})
    model = load_target(target_dir, DTYPES[options.dtype], options.device)
    for temperature in _measurable(options.temperatures, model, rows, options.tokens):
        written = responses_at(
            lambda: model,
            target_dir,
            rows,
            dtype=DTYPES[options.dtype],
            temperature=temperature,
            tokens=options.tokens,
            seed=options.seed,
            report=bar(f"temperature {temperature:g}: responses of the target", len(rows)),
        )
        responses = Responses(model, written, aux_layers, temperature, bar("hidden states of the target", len(rows)))
        for name, head in heads.items():
            report = bar(f"drafts of {name}", len(rows))
            found = evaluate(head, responses, options.seed, report, shapes_of(options.steps))
            results[name] |= {f"{shape}_t{temperature:g}": counts for shape, counts in found.items()}
    return results


def _measurable(temperatures: Sequence[float], model: Any, rows: Sequence[TokenRow], longest: int) -> list[float]:
    """The temperatures at which this target can be measured; a line on stderr says why not at the others.

    longest: tokens of a response.

    Raises:
        DataError: it is none of them.
    """
    if not any(temperatures):
        return list(temperatures)
    prompts = [row.prompt_ids for row in rows]
    text, needed = [token for ids in prompts for token in ids], max(map(len, prompts)) + max(longest, 4)
    try:
        check_tree_reading(model, (text * -(-needed // len(text)))[:needed])
    except (DataError, RuntimeError, TypeError, ValueError) as error:  # a target's own refusal of such a mask, too
        if is_out_of_memory(error):
            raise
        left = [temperature for temperature in temperatures if not temperature]
        if not left:
            raise
        out = " ".join(f"{temperature:g}" for temperature in temperatures if temperature)
        print(f"not measured at temperature {out}: {error}", file=sys.stderr)
        return left
    return list(temperatures)


def _rows(options: argparse.Namespace, target_dir: Path) -> list[TokenRow]:
    if options.rows:
        return held_out_rows(options.rows, options.prompts)
    return set_rows(options.sets, options.prompts, load_tokenizer(target_dir))


def _name(path: Path, paths: list[Path]) -> str:
    """The folder's name if no other head has the same, else the path."""
    name = path.resolve().name
    return name if [p.resolve().name for p in paths].count(name) == 1 else str(path)


def _domains(counts: Sequence[AcceptCounts]) -> dict[str, list[int]]:
    """The indices of each domain's prompts, and of all prompts."""
    domains: dict[str, list[int]] = {}
    for place, count in enumerate(counts):
        domains.setdefault(count.domain, []).append(place)
    return domains if len(domains) == 1 else domains | {POOLED: list(range(len(counts)))}


def _stats(measured: dict[str, list[AcceptCounts]]) -> dict[str, dict[str, Any]]:
    """domain -> name -> the statistics as plain numbers; a domain without a round does not have the name."""
    document: dict[str, dict[str, Any]] = {}
    for name, counts in measured.items():
        for domain, places in _domains(counts).items():
            stats = summarize([counts[place] for place in places])
            document.setdefault(domain, {}).update({name: stats.to_json()} if stats else {})
    return document


def _table(
    results: Results, document: dict[str, dict[str, dict[str, Any]]], temperatures: list[float], steps: int
) -> Table:
    """One row per temperature, set and head; with one head the acceptance per draft, with several the gain."""
    base, several = next(iter(results)), len(results) > 1
    table = Table(
        title="accept length, the bonus token included (95 % interval)", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    last = "gain of the tree" if several else "k-th draft accepted"
    for column in ("T", "set", *(["head"] if several else []), f"chain of {steps}", "tree of 16", last):
        table.add_column(column, overflow="fold")
    for temperature in temperatures:
        chain, tree = (f"{shape}_t{temperature:g}" for shape in shapes_of(steps))
        if tree not in results[base]:
            continue
        for domain, places in _domains(results[base][tree]).items():
            for head in results:
                stats = document[head][domain]
                cells = [f"{temperature:g}", domain, *([head] if several else [])]
                if chain not in stats:
                    table.add_row(*cells, "responses too short")
                    continue
                cells += [_interval("{:.3f}", *(stats[name][key] for key in ("accept_length", "low", "high")))
                          for name in (chain, tree)]  # fmt: skip
                if not several:
                    cells.append("  ".join(f"{x:.2f}" for x in stats[chain]["conditional"]))
                elif head != base:
                    new, old = ([results[name][tree][place] for place in places] for name in (head, base))
                    cells.append(_interval("{:+.1%}", *gain(new, old)))
                table.add_row(*cells)
        table.add_section()
    return table


def _interval(form: str, mean: float, low: float, high: float) -> str:
    return f"{form.format(mean)} ({form.format(low)} to {form.format(high)})"


def _write(path: Path, document: dict[str, dict[str, dict[str, Any]]]) -> None:
    last = list(document.values())[-1]
    plain = {
        domain: {name: f["accept_length"] for name, f in stats.items() if "everywhere" not in name}
        for domain, stats in last.items()
        if domain != POOLED
    }
    write_output(path, [json.dumps(plain, indent=1), "\n"], ANOTHER_FILE)
    write_output(path.with_name(f"{path.stem}-details.json"), [json.dumps(document, indent=1), "\n"], ANOTHER_FILE)


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Yield a function (what, how many) -> report(done) that draws one bar per call on stderr; lines in a log."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBars(*columns, console=console) as progress:

        def bar(what: str, total: int) -> Callable[[int], None]:
            tasks: list[TaskID] = []  # made by the first report, so that a step that is already done shows no bar

            def report(done: int) -> None:
                if not tasks:
                    tasks.append(progress.add_task(what, total=total))
                progress.update(tasks[0], completed=done)
                report_progress(done, total, what)

            return report

        yield bar
