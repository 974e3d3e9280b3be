"""How many texts of a seed are the same in another batch and with trees of another shape (`--help` explains)."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_plugin.bench.choices import check_engine, resolve_head, resolve_target
from eagle_plugin.bench.engine import EngineEndpoint
from eagle_plugin.bench.load import Completion, Sampling, accept_length, connect, served_model, stream_chat
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.preparation import add_server_options, at_least, plain_spec
from eagle_plugin.bench.progress import Step, Steps
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving
from eagle_plugin.common.command_line import Parser
from eagle_plugin.models.shipped import question_files

EXPLANATION = """\
One server with the plugin, whose trees have a shape at random in every round, answers seeded requests twice. The second
time they come in another order, and both times unseeded requests run beside them, so that a request is never in the
same batch again. A text is the same if all of its characters are.
"""
RUNS = ("first", "again")


class SeedReport(Strict):
    """out/seeds-<engine>.json."""

    engine: str
    dtype: str
    temperature: float
    requests: int
    tokens: int  # of each text
    clients: int
    same: int  # texts
    equal_characters: list[int]  # before the first difference, of the texts that differ
    accept_length: float | None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="seeds.py", description=EXPLANATION, formatter_class=raw)
    add_server_options(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the target (float32)")
    parser.add_argument("--requests", type=at_least(1), default=200, help="seeded requests (default: 200)")
    parser.add_argument("--tokens", type=at_least(1), default=300, help="of each text (default: 300)")
    parser.add_argument("--clients", type=at_least(2), default=8, help="requests at a time (default: 8)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    return parser.parse_args(argv)


async def ask(
    server: EngineEndpoint, questions: Sequence[tuple[int, Question]], sampling: Sampling, clients: int, bar: Step
) -> dict[int, Completion]:
    """The answers by seed. Every fourth client asks the same questions without a seed until all others are done."""
    waiting, found = iter(questions), {}
    done = 0

    async with connect(server) as client:
        model = await served_model(client)

        async def seeded() -> None:
            nonlocal done
            for seed, question in waiting:
                with_seed = replace(sampling, seed=seed)
                found[seed] = await stream_chat(client, server.engine, model, question, with_seed)
                done += 1
                bar.update(f"{done} of {len(questions)} texts", done / len(questions))

        async def beside() -> None:
            for seed, question in itertools.cycle(questions):
                tokens = 1 + seed * 7 % sampling.max_tokens
                await stream_chat(client, server.engine, model, question, replace(sampling, max_tokens=tokens))

        others = [asyncio.ensure_future(beside()) for _ in range(max(1, clients // 4))]
        try:
            await asyncio.gather(*(seeded() for _ in range(clients - len(others))))
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    return found


def compare(options: argparse.Namespace, runs: Sequence[dict[int, Completion]]) -> SeedReport:
    """What the two runs say about each text."""
    first, again = ({seed: answer.output.text for seed, answer in run.items()} for run in runs)
    differ = [seed for seed in first if first[seed] != again[seed]]
    pairs = (zip(first[seed], again[seed], strict=False) for seed in differ)
    equal = [sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], of)) for of in pairs]
    return SeedReport(
        engine=options.engine, dtype=options.dtype, temperature=options.temperature, requests=len(first),
        tokens=options.tokens, clients=options.clients, same=len(first) - len(differ), equal_characters=sorted(equal),
        accept_length=accept_length([answer for run in runs for answer in run.values()]),
    )  # fmt: skip


def spec_of(options: argparse.Namespace, target: Path) -> ServerSpec:
    """The server."""
    cache = options.clients * (options.tokens + 512)
    plain = plain_spec(options.engine, target, options.device, options.threads, options.clients, cache)
    environment = {"EAGLE_POLICY": "random"}
    return replace(
        plain, mode="plugin", head=resolve_head(options.head, target), dtype=options.dtype, environment=environment,
        is_async=options.is_async,
    )  # fmt: skip


def run(options: argparse.Namespace, steps: Steps) -> None:
    """Start the server, ask twice, and write the report. Raises ServerError, LoadError, ValueError or UserError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    prompts = list(itertools.chain.from_iterable(assign_rounds(read_questions(question_files()))))
    questions = list(enumerate(itertools.islice(itertools.cycle(prompts), options.requests)))
    sampling = Sampling(max_tokens=options.tokens, temperature=options.temperature, ignore_eos=True)
    runs = []
    with serving({"plugin": spec_of(options, target)}, options.out / "logs", steps) as servers:
        server = servers["plugin"]
        server.resume()
        for number, name in enumerate(RUNS):
            order = random.Random(number).sample(questions, len(questions))
            with steps.step(f"{options.requests} seeded requests, {name}") as bar:
                runs.append(asyncio.run(ask(server.endpoint, order, sampling, options.clients, bar)))
    report = compare(options, runs)
    write_json(report, options.out / f"seeds-{options.engine}.json")
    table = Table("engine", "dtype", "texts", "tokens", "the same", "accept length")
    length = "" if report.accept_length is None else f"{report.accept_length:.2f}"
    share = f"{report.same} ({report.same / report.requests:.1%})"
    table.add_row(report.engine, report.dtype, str(report.requests), str(report.tokens), share, length)
    steps.console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the report; 1 after a failure, whose message is printed."""
    options, steps = parse(argv), Steps(Console())

    def command() -> int:
        run(options, steps)
        return 0

    return exit_status("the benchmark of seeds", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
