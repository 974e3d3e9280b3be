"""Speed with and without looked-up branches: real servers of one engine, asked in turns, one request at a time.

    python benchmarks/lookup_servers.py --engine sglang [--repeats 8] [--out out]

Four servers of one target and head: plain decoding, the engine's own speculation, and the plugin with EAGLE_LOOKUP=off
and =on, each with its default policy, under caps that leave a looked-up path room. Groups of questions: "ordinary" of
examples/prompts, and "repeating", whose answers repeat code of the prompt (`benchmarks/lookup.py`). A repeat asks each
server the same three questions of one group while the others are stopped; ratios are of one repeat. The report is
out/lookup-ENGINE.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lookup import prompts_of
from eagle_plugin.bench.choices import add_model_options, parse_shape, resolve_head, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import Sampling
from eagle_plugin.bench.machine import Machine, describe_machine, usable_cores
from eagle_plugin.bench.measure import RepeatSeries, measure_interleaved
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import StealCount, write_json
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving, warm_up_all
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.tables import number, plain_table, with_quartiles
from eagle_plugin.core.shape import Shape

ASKED = 3  # questions of a repeat
PLAIN, BUILTIN, OFF, ON = "plain", "builtin", "off", "on"


class Row(Strict):
    """One server and one group of questions."""

    group: str
    server: str
    tokens_per_s: Quartiles
    accept_length: float | None
    over_off: Quartiles | None  # tokens per second over those of the plugin without looked-up branches
    same_text_as_off: int  # of `responses`
    responses: int


class Report(Strict):
    """out/lookup-ENGINE.json."""

    engine: str
    target: str
    head: str
    shape: str
    max_tokens: int
    repeats: int
    threads: int
    rows: list[Row]
    steal: StealCount
    machine: Machine


class Group(NamedTuple):
    """Questions of one kind, as repeats."""

    name: str
    repeats: list[list[Question]]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--shape", type=parse_shape, default=Shape(5, 4, 16), metavar="S/K/N", help="caps (5/4/16)")
    parser.add_argument("--repeats", type=int, default=8, help=f"of {ASKED} questions, for each group (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: 128)")
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the report and of logs/")
    options = parser.parse_args(argv)
    options.threads = options.threads or ENGINES[options.engine].default_threads(usable_cores())
    return options


def groups(repeats: int) -> list[Group]:
    """Both kinds, as often from the beginning as it takes."""
    found = []
    asked = prompts_of(argparse.Namespace(prompts=ASKED * repeats))
    for name in dict.fromkeys(kind for kind, _ in asked):
        prompts = [prompt for kind, prompt in asked if kind == name]
        questions = (
            Question(id=f"{name}-{i}", group=name, prompt=prompt) for i, prompt in enumerate(itertools.cycle(prompts))
        )
        found.append(Group(name, [list(itertools.islice(questions, ASKED)) for _ in range(repeats)]))
    return found


def specs_of(options: argparse.Namespace, target: Path, head: Path) -> dict[str, ServerSpec]:
    """The four servers."""
    engine = ENGINES[options.engine]
    plain = ServerSpec(target=target, mode="plain", engine=options.engine, threads=options.threads, name=PLAIN)
    plugin = replace(plain, mode="plugin", head=head, shape=options.shape)
    return {
        PLAIN: plain,
        BUILTIN: replace(plain, mode="builtin", head=head, shape=engine.builtin_shape, name=BUILTIN),
        **{name: replace(plugin, name=name, environment={"EAGLE_LOOKUP": name}) for name in (OFF, ON)},
    }


def rows_of(group: str, series: Mapping[str, RepeatSeries]) -> list[Row]:
    """What one group of questions showed."""
    off = series[OFF]
    return [
        Row(
            group=group,
            server=name,
            tokens_per_s=quartiles(one.tokens_per_s),
            accept_length=None if one.accept_length is None else round(one.accept_length, 4),
            over_off=None if name == OFF else ratio_quartiles(one.tokens_per_s, off.tokens_per_s),
            same_text_as_off=sum(a == b for a, b in zip(one.responses, off.responses, strict=True)),
            responses=len(one.responses),
        )
        for name, one in series.items()
    ]


def measure(options: argparse.Namespace, steps: Steps) -> Report:
    """Serve, measure and return the report. Raises ServerError, LoadError or ValueError."""
    target = resolve_target(options.target, steps.console)
    head = resolve_head(options.head, target)
    specs = specs_of(options, target, head)
    watch, rows = StealWatch(2 * len(specs) * options.repeats, steps.log), []
    with serving(specs, (options.out / "logs").resolve(), steps) as servers:
        for name, repeats in groups(options.repeats):
            warm_up_all(servers, repeats[0], steps)
            with steps.step(f"measuring {name} answers") as step:
                sampling = Sampling(max_tokens=options.max_tokens)
                rows += rows_of(name, measure_interleaved(servers, repeats, sampling, step.update, watch=watch))
    return Report(
        engine=options.engine,
        target=target.name,
        head=head.name,
        shape=str(specs[ON].shape),
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        threads=options.threads,
        rows=rows,
        steal=StealCount.of(watch),
        machine=describe_machine(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the report; 1 after a failure, whose message is printed."""
    options, steps = parse(argv), Steps(Console())

    def command() -> int:
        report = measure(options, steps)
        write_json(report, options.out / f"lookup-{options.engine}.json")
        columns = ("answers", "server", "tokens/s", "accept length", "over lookups off", "same text")
        title = f"{report.target}, {report.engine}, trees of {report.shape}, {report.repeats} repeats"
        table = plain_table(title, report.steal.sentence(), columns, left=columns[:2])
        for row in report.rows:
            cells = (with_quartiles(row.tokens_per_s, 1), number(row.accept_length), with_quartiles(row.over_off, 3))
            table.add_row(row.group, row.server, *cells, f"{row.same_text_as_off} of {row.responses}")
        steps.console.print(table)
        return 0

    return exit_status("lookup", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
