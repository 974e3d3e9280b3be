"""`make loop`: from a shipped head to a better one on your traffic, in one command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from eagle_plugin.bench.choices import check_engine, default_engine, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.preparation import at_least
from eagle_plugin.common.atomic_io import replace_output
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.devices import default_device
from eagle_plugin.common.json_files import kept_object
from eagle_plugin.common.recipes import override_key
from eagle_plugin.learning.jobs.job_file import check_job, workflow_values
from eagle_plugin.learning.jobs.lineage import LINEAGE
from eagle_plugin.learning.jobs.recipe import JobRecipe
from eagle_plugin.learning.jobs.runner import run_job
from eagle_plugin.learning.jobs.stage_process import INTERRUPTED, StopRequested
from eagle_plugin.learning.jobs.watch import Watch
from eagle_plugin.learning.loop.prompts import DOMAIN, LoopError
from eagle_plugin.learning.loop.summary import print_report, read_report
from eagle_plugin.learning.train.recipe import changed_keys

# Option -> the key of the job that it sets, and its help.
OPTIONS = {
    "count": ("traffic.count", "prompts that are asked and trained on"),
    "held_out": ("traffic.held_out", "prompts that only measurements ask"),
    "answer_tokens": ("traffic.max_tokens", "longest answer of the traffic"),
    "traffic_concurrency": ("traffic.concurrency", "prompts that are asked at a time"),
    "epochs": ("train.head.budget.epochs", "of the training"),
    "batch_tokens": ("train.head.batch_tokens", "tokens of one update"),
    "eval_tokens": ("traffic.eval_tokens", "longest answer on which accept lengths are measured"),
    "repeats": ("benchmark.repeats", "of the benchmark"),
    "bench_tokens": ("benchmark.max_tokens", "mean longest answer of the benchmark"),
    "swap_clients": ("exchange.clients", "clients while the head is exchanged"),
    "swap_questions": ("exchange.questions", "questions that they ask"),
    "swap_tokens": ("exchange.max_tokens", "longest answer to them"),
}
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
    """The command's options."""
    parser = Parser(prog="loop", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="folder of the results (out)")
    add("--no-swap", action="store_true", help="leave out the exchange of the head")
    add("--engine", choices=sorted(ENGINES), default=default_engine(), help="(%(default)s)")
    add("--target", default="smollm2-135m-instruct", help="a folder, or a name of `models list` (%(default)s)")
    add("--head", default="smollm2-135m-instruct-eagle3", help="the head to train further (%(default)s)")
    add("--prompts", type=Path, metavar="FILE", help=f"own prompts (default: {DOMAIN})")
    for name, (key, text) in OPTIONS.items():
        add(f"--{name.replace('_', '-')}", type=at_least(1), metavar="N", help=f"{text} ({key} of the job)")
    add("--lr", type=at_least(1e-9, float), help="peak of the learning rate (0.001)")
    add("--concurrency", type=at_least(1), nargs="+", metavar="N", help="numbers of clients of the benchmark (1 4 8)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop. 0: it showed what it is to; 1: a result below that; 2: refused, or a stage failed; 130: Ctrl-C."""
    options = parse(argv)
    console = Console()
    return exit_status("loop", console, lambda: run_loop(options, console))


def job_of(options: argparse.Namespace) -> JobRecipe:
    """The job of the options: a workflow of `eagle-plugin optimize` with some keys changed.

    Raises:
        JobError: the folder of the head or the file of prompts is not there.
    """
    own = [] if options.prompts is None else [str(options.prompts.resolve())]
    workflow, on_gpu = f"traffic-{'own' if own else 'builtin'}", default_device() == "cuda"
    values = workflow_values(workflow, options.target, options.head, own, [], on_gpu)
    given = {key: getattr(options, name) for name, (key, _) in OPTIONS.items()}
    given |= {"train.head.optimiser.lr": options.lr, "benchmark.concurrency": options.concurrency}
    given |= {"benchmark.engine": options.engine}
    for key, value in given.items():
        if value is not None:
            override_key(values, f"{key}={value}", LoopError)
    return check_job({**values, **({"exchange": None} if options.no_swap else {})}, [], "the options")


def run_loop(options: argparse.Namespace, console: Console) -> int:
    """Run the stages that are not done, and print the result; 1 if it is below what is wanted.

    Raises:
        UserError, ServerError, ValueError: with one sentence for the user.
    """
    check_engine(options.engine)
    job, folder = job_of(options), options.out / "loop"
    refuse_other_options(job, folder)
    try:
        run_job(job, resolve_target(job.target, console), folder, console, watch=Watch(console))
    except StopRequested:
        console.print("stopped; the same command continues")
        return INTERRUPTED
    for made in (folder / "loop.json", folder / "report/report.html", folder / "report/report.md"):
        with replace_output(options.out / made.name) as temporary:
            temporary.write_bytes(made.read_bytes())
    report = read_report(folder / "loop.json")
    print_report(report, console)
    console.print(f"written to {options.out / 'loop.json'} and {options.out / 'report.html'}", highlight=False)
    return 0 if report.good else 1


def refuse_other_options(job: JobRecipe, folder: Path) -> None:
    """Raise LoopError if the folder was begun with other options: its results depend on all of them."""
    begun = kept_object(folder / LINEAGE).get("recipe")  # None: nothing is done yet
    if begun and (changes := changed_keys(begun, job.model_dump(mode="json"))):
        raise LoopError(
            f"{folder} was begun with other settings: {', '.join(changes)}; give the earlier ones again, another "
            f"--out, or remove {folder} to begin again"
        )
