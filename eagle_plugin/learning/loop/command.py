"""`make loop`: from a shipped head to a better one on your traffic, in one command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.choices import check_engine, default_engine, resolve_head, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.preparation import at_least
from eagle_plugin.bench.progress import Steps
from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.jobs.locks import hold
from eagle_plugin.learning.loop.plan import plan_steps
from eagle_plugin.learning.loop.prompts import DOMAIN
from eagle_plugin.learning.loop.settings import LoopSettings, keep_settings
from eagle_plugin.learning.loop.steps import run_steps
from eagle_plugin.learning.loop.summary import print_report, summarise, write_report

DESCRIPTION = """\
The whole way in one command: serve a small real model with its draft head and
record the traffic, train the head further on the record, measure the target
without EAGLE, with the base head and with the trained head, and exchange the
head of a server while requests are running. OUT/loop.json and OUT/report.html
have the results.
"""
EPILOG = """\
examples:
  make loop                                                half an hour on two quiet cores
  make loop ARGS='--out /data/loop'                        results in another folder
  make loop ARGS='--prompts prompts.jsonl --count 500'     own prompts, a file of `eagle-plugin data prepare`
  make loop ARGS='--target DIR --head DIR --prompts FILE'  own model

The same command continues after Ctrl-C or a kill: steps whose output is there are skipped. The folder OUT/loop has all
that the steps make; remove it to begin again. docs/loop.md describes the steps and the results.
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options; those that the results depend on are named as in LoopSettings."""
    parser = Parser(
        prog="loop", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    fields = LoopSettings.model_fields
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the results (out)")
    parser.add_argument("--no-swap", action="store_true", help="leave out the exchange of the head")
    parser.add_argument("--engine", choices=sorted(ENGINES), default=default_engine(), help="(%(default)s)")
    for name, text in (("target", "a folder, or a name of `models list`"), ("head", "the head to train further")):
        parser.add_argument(f"--{name}", default=fields[name].default, help=f"{text} (%(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=f"own prompts (default: {DOMAIN})")
    numbers = {
        "count": "prompts that are asked and trained on",
        "held_out": "prompts that only measurements ask",
        "answer_tokens": "longest answer of the traffic",
        "traffic_concurrency": "prompts that are asked at a time",
        "epochs": "of the training",
        "batch_tokens": "tokens of one update",
        "eval_tokens": "longest answer on which accept lengths are measured",
        "repeats": "of the benchmark",
        "bench_tokens": "mean longest answer of the benchmark",
        "swap_clients": "clients while the head is exchanged",
        "swap_questions": "questions that they ask",
        "swap_tokens": "longest answer to them",
    }
    for name, text in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=at_least(1),
            metavar="N",
            default=fields[name].default,
            help=f"{text} (%(default)s)",
        )
    parser.add_argument("--lr", type=at_least(1e-9, float), default=fields["lr"].default, help="peak (%(default)s)")
    parser.add_argument(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        metavar="N",
        default=fields["concurrency"].default,
        help="numbers of clients of the benchmark (1 4 8)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop. 0: it showed what it is to show; 1: a failure, or a result below that; 130 after Ctrl-C."""
    options = parse(argv)
    console = Console()
    values = {name: value for name, value in vars(options).items() if name not in ("out", "no_swap")}
    values["prompts"] = None if options.prompts is None else options.prompts.resolve()
    settings = LoopSettings(**values)
    return exit_status("loop", console, lambda: run_loop(settings, options.out, console, swap=not options.no_swap))


def run_loop(settings: LoopSettings, out: Path, console: Console, swap: bool = True) -> int:
    """Run all steps that are not done, write loop.json and print the tables; 1 if the result is below what is wanted.

    Raises:
        UserError, ServerError, LoadError, ValueError: with one sentence for the user.
    """
    folder = out / "loop"
    check_engine(settings.engine)
    with hold({"--out": folder}):
        keep_settings(settings, folder / "settings.json")
        target = resolve_target(settings.target, console)
        head = resolve_head(settings.head, target)
        steps = plan_steps(settings, target, head, out, folder, Steps(console), swap=swap)
        seconds = run_steps(steps, folder / "times.json", console)
        domain = DOMAIN if settings.prompts is None else settings.prompts.name
        report = summarise(settings, domain, folder, seconds, swap)
        write_report(report, out / "loop.json")
    print_report(report, console)
    console.print(f"written to {out / 'loop.json'} and {out / 'report.html'}", highlight=False)
    return 0 if report.good else 1
