"""Compare the speed of the plugin of two checkouts, interleaved in one run.

Both serve the same target and head with the same tree, each with the Python environment of its own checkout. The new
checkout is the one of this file unless --new names another. Half of the repeats are made after both servers were
started anew in the other order: of two servers of the same code one may be slower for as long as both run. For example:

    git worktree add ../base main~20 && make -C ../base env
    .venv-sglang/bin/python benchmarks/compare_commits.py --engine sglang --base ../base
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.choices import add_model_options, parse_shape, resolve_head, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import Sampling
from eagle_plugin.bench.machine import Machine, busy_percent, describe_machine
from eagle_plugin.bench.measure import RepeatSeries, measure_interleaved
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Quartiles, quartiles
from eagle_plugin.bench.questions import assign_rounds, read_questions
from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving, warm_up_all
from eagle_plugin.bench.tables import with_quartiles
from eagle_plugin.common.devices import usable_cores
from eagle_plugin.models.shipped import question_files

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("base", "new")

# Lets each server process itself report from where it imports the plugin: the import of the first sub-module gets the
# package's path. Python imports sitecustomize from its module path at every start, also in child processes.
SITECUSTOMIZE = """\
import os, sys

class _Report:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("eagle_plugin.") and path:
            os.write(2, f"compare_commits: eagle_plugin of {os.path.dirname(list(path)[0])}\\n".encode())
            sys.meta_path.remove(_Report)

sys.meta_path.insert(0, _Report)
"""
IMPORTED_FROM = re.compile(r"compare_commits: eagle_plugin of (.+)")


class Side(BaseModel):
    """One of the two checkouts."""

    model_config = ConfigDict(extra="forbid")

    commit: str = Field(description="git's name of the commit, with -dirty if files were changed")
    tokens_per_s: Quartiles
    accept_length: float = Field(ge=1)


class CommitComparison(BaseModel):
    """`out/compare-<engine>.json`."""

    model_config = ConfigDict(extra="forbid")

    engine: str
    target: str
    head: str
    shape: str
    base: Side
    new: Side
    new_over_base: Quartiles = Field(
        description="ratio of tokens per second: the geometric mean of a repeat after each order of starts"
    )
    ratios: list[float] = Field(description="of each repeat, those of the first order of starts first")
    by_first_start: dict[str, float] = Field(description="median of the ratios, by the side that was started first")
    repeats: int
    same_responses: int = Field(description="measured answers with the same text on both sides")
    compared_responses: int
    max_tokens: int
    threads: int
    quick: bool
    busy_percent: float
    machine: Machine
    date: str


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="compare_commits.py", description=__doc__, formatter_class=raw)
    add_model_options(parser)
    parser.add_argument("--base", type=Path, required=True, metavar="CHECKOUT", help="the checkout to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, metavar="CHECKOUT", help="default: the one of this file")
    for side in SIDES:
        text = "default: CHECKOUT/.venv-ENGINE/bin/python"
        parser.add_argument(f"--{side}-python", type=Path, metavar="PYTHON", help=text)
    parser.add_argument("--shape", type=parse_shape, metavar="S/K/N", help="tree (default: the engine's in the demo)")
    parser.add_argument(
        "--repeats", type=int, default=16, help="each asks 3 questions of both; an even number (default: 16)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer (default: 128)")
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--quick", action="store_true", help="2 repeats of 32 tokens: a trial, not a result")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the report and of logs/ (default: out)"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats, options.max_tokens = 2, 32
    if options.repeats < 2 or options.repeats % 2:
        parser.error(f"--repeats is {options.repeats}, wanted an even number of at least 2")
    options.threads = options.threads or ENGINES[options.engine].default_threads(usable_cores())
    return options


def side_spec(plugin: ServerSpec, side: str, checkout: Path, python: Path | None, hook: Path) -> ServerSpec:
    """`plugin` as the environment and the sources of `checkout` serve it; `hook` is the folder of sitecustomize.py."""
    checkout = checkout.resolve()
    # Not resolved: a virtual environment is found by the path of its link to the interpreter.
    python = (python or checkout / f".venv-{plugin.engine}/bin/python").absolute()
    if not python.exists():
        target = "env" if plugin.engine == "sglang" else "env-vllm"
        raise ServerError(f"--{side}-python {python}: no such file; run `make {target}` in {checkout}, or name another")
    if not (checkout / "eagle_plugin/__init__.py").is_file():
        raise ServerError(
            f"--{side} {checkout}: no eagle_plugin/ there; give the root of a checkout of this repository"
        )
    paths = [hook, checkout] + ([checkout / "compat/sglang-cpu/src"] if plugin.engine == "sglang" else [])
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    # `python -m` puts the working directory before PYTHONPATH, so that has to be the checkout too.
    return replace(plugin, python=python, environment=environment, name=side, directory=checkout)


def check_sources(server: Server, checkout: Path) -> None:
    """Check in its log that every process of the server imported the plugin of `checkout`. Raises ServerError."""
    found = set(IMPORTED_FROM.findall(server.log_text()))
    if found != {str(checkout.resolve())}:
        raise ServerError(
            f"{server.label}: the plugin was imported from {', '.join(sorted(found)) or 'nowhere'}, wanted {checkout}; "
            "another copy comes first on the module path of that environment"
        )


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, with -dirty if tracked files were changed; "unknown" outside of git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def compare(options: argparse.Namespace, steps: Steps) -> CommitComparison:
    """Serve both sides, measure, and return the report. Raises ServerError, LoadError or ValueError."""
    target = resolve_target(options.target, steps.console)
    head = resolve_head(options.head, target)
    shape = options.shape or ENGINES[options.engine].plugin_shape(head)
    plugin = ServerSpec(
        target=target, head=head, mode="plugin", engine=options.engine, shape=shape, threads=options.threads
    )
    checkouts = {"base": options.base, "new": options.new}
    pythons = {"base": options.base_python, "new": options.new_python}
    rounds = assign_rounds(read_questions(question_files()))
    repeats = list(itertools.islice(itertools.cycle(rounds), options.repeats))
    with tempfile.TemporaryDirectory() as hook:
        Path(hook, "sitecustomize.py").write_text(SITECUSTOMIZE)
        half, busy = options.repeats // 2, 0.0
        parts: list[Mapping[str, RepeatSeries]] = []
        for order, part in ((SIDES, repeats[:half]), (SIDES[::-1], repeats[half:])):
            specs = {side: side_spec(plugin, side, checkouts[side], pythons[side], Path(hook)) for side in order}
            with serving(specs, (options.out / f"logs/{order[0]}-first").resolve(), steps) as servers:
                warm_up_all(servers, part[0], steps)
                for side, server in servers.items():
                    check_sources(server, checkouts[side])
                busy = max(busy, busy_percent())
                with steps.step(f"measuring, {order[0]} started first") as step:
                    parts.append(
                        measure_interleaved(servers, part, Sampling(max_tokens=options.max_tokens), step.update)
                    )
    series = {side: RepeatSeries(tuple(one for part in parts for one in part[side].repeats)) for side in SIDES}
    return report_of(options, plugin, series, busy)


def report_of(
    options: argparse.Namespace, plugin: ServerSpec, series: Mapping[str, RepeatSeries], busy: float
) -> CommitComparison:
    """The document of what was measured; ValueError if the engine reported no verify round."""
    sides = {}
    for side, checkout in (("base", options.base), ("new", options.new)):
        length = series[side].accept_length
        if length is None:
            raise ValueError(f"{side}: the engine reported no verify round, so its accept length is unknown")
        rates = quartiles(series[side].tokens_per_s)
        sides[side] = Side(commit=commit_of(checkout), tokens_per_s=rates, accept_length=round(length, 4))
    new, base = series["new"], series["base"]
    ratios = [a / b for a, b in zip(new.tokens_per_s, base.tokens_per_s, strict=True)]
    halves = ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]
    assert plugin.head is not None
    return CommitComparison(
        engine=plugin.engine,
        target=plugin.target.name,
        head=plugin.head.name,
        shape=str(plugin.shape),
        base=sides["base"],
        new=sides["new"],
        new_over_base=quartiles([math.sqrt(a * b) for a, b in zip(*halves, strict=True)]),
        ratios=[round(ratio, 4) for ratio in ratios],
        by_first_start={side: round(statistics.median(half), 4) for side, half in zip(SIDES, halves, strict=True)},
        repeats=len(new.repeats),
        same_responses=sum(a == b for a, b in zip(new.responses, base.responses, strict=True)),
        compared_responses=len(new.responses),
        max_tokens=options.max_tokens,
        threads=options.threads,
        quick=options.quick,
        busy_percent=busy,
        machine=describe_machine(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def comparison_table(report: CommitComparison) -> Table:
    """One row per checkout; the ratio is in the caption."""
    ratio = report.new_over_base
    title = f"{report.target}, {report.engine}, eagle-plugin {report.shape}, bf16, {report.repeats} interleaved repeats"
    caption = (
        f"new / base: {ratio.median:.3f} \\[{ratio.q1:.3f}-{ratio.q3:.3f}] "
        f"({', '.join(f'{side} started first: {found:.3f}' for side, found in report.by_first_start.items())}); "
        f"{report.same_responses} of {report.compared_responses} texts are the same"
    )
    table = Table("", "commit", r"tokens/s \[quartiles]", "accept length", title=title, caption=caption)
    for side in (report.base, report.new):
        name = "base" if side is report.base else "new"
        table.add_row(name, side.commit, with_quartiles(side.tokens_per_s, 1), f"{side.accept_length:.3f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table and write the report; 1 after a failure, whose message is printed."""
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        report = compare(options, steps)
        path = options.out / f"compare-{options.engine}.json"
        write_json(report, path)
        steps.console.print(comparison_table(report))
        steps.log(f"written to {path}")
        return 0

    return exit_status("comparison", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
