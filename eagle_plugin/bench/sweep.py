"""Measures one tree shape after the other, each interleaved with plain decoding, to find a worker's best one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.choices import (
    ENGINE_FLAGS,
    add_model_options,
    check_engine,
    chosen_device,
    parse_shape,
    parse_with_engine_flags,
    resolve_head,
    resolve_target,
)
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import Sampling
from eagle_plugin.bench.measure import measure_interleaved
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Quartiles, quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving, warm_up_all
from eagle_plugin.bench.tables import number, with_quartiles
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.devices import usable_cores
from eagle_plugin.core.shape import Shape
from eagle_plugin.models.shipped import question_files


class ShapeResult(NamedTuple):
    """The result of one shape."""

    shape: Shape
    tokens_per_s: Quartiles
    speedup: Quartiles  # over plain decoding, per repeat
    accept_length: float | None


def sweep(
    plain: ServerSpec,
    candidate: ServerSpec,
    shapes: Sequence[Shape],
    repeats: Sequence[Sequence[Question]],
    sampling: Sampling,
    logs: Path,
    steps: Steps,
) -> Iterator[ShapeResult]:
    """Serve `candidate` with each shape in turn beside one plain server, and yield each result when it is measured."""
    with serving({"plain": plain}, logs, steps, others=1) as base:
        warm_up_all(base, repeats[0], steps)
        for shape in shapes:
            with serving({"candidate": replace(candidate, shape=shape)}, logs, steps, others=1) as server:
                warm_up_all(server, repeats[0], steps)
                with steps.step(f"measuring {shape}") as step:
                    series = measure_interleaved({**base, **server}, repeats, sampling, step.update)
            yield ShapeResult(
                shape,
                quartiles(series["candidate"].tokens_per_s),
                ratio_quartiles(series["candidate"].tokens_per_s, series["plain"].tokens_per_s),
                series["candidate"].accept_length,
            )


def sweep_table(results: Sequence[ShapeResult], title: str) -> Table:
    """One row per shape; the fastest is highlighted."""
    best = max(results, key=lambda result: result.speedup.median)
    table = Table("steps/topk/tokens", "tokens/s", "speed-up over plain [quartiles]", "accept length", title=title)
    for result in results:
        table.add_row(
            str(result.shape),
            f"{result.tokens_per_s.median:.1f}",
            with_quartiles(result.speedup, unit="x"),
            number(result.accept_length),
            style="bold green" if result is best else "",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all shapes and print the table."""
    parser = Parser(prog="eagle-plugin bench", description=__doc__, epilog=ENGINE_FLAGS)
    add_model_options(parser)
    parser.add_argument(
        "--mode", choices=["builtin", "plugin"], default="builtin", help="whose worker to tune (default: builtin)"
    )
    parser.add_argument("--shapes", type=parse_shape, nargs="+", metavar="S/K/N", help="default: the engine's list")
    parser.add_argument("--rounds", type=int, default=5, help="repeats, with one question per group each (default: 5)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per answer (default: 96)")
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of logs/ (default: out)")
    options = parse_with_engine_flags(parser, argv)
    steps = Steps(Console())

    def command() -> int:
        check_engine(options.engine, options.device, options.mode == "plugin")
        target, device = resolve_target(options.target, steps.console), chosen_device(options.device)
        threads = options.threads or ENGINES[options.engine].default_threads(usable_cores())
        plain = ServerSpec(
            target=target,
            mode="plain",
            engine=options.engine,
            device=device,
            threads=threads,
            extra_flags=options.engine_flags,
        )
        fixed = {"EAGLE_POLICY": "fixed"}  # the shape itself is measured, not what a policy makes of it
        head = resolve_head(options.head, target, options.engine)
        candidate = replace(plain, mode=options.mode, head=head, environment=fixed)
        repeats = assign_rounds(read_questions(question_files()))[: options.rounds]
        sampling = Sampling(max_tokens=options.max_tokens)
        shapes = options.shapes or ENGINES[options.engine].sweep_shapes[options.mode]
        for shape in shapes:  # one that cannot be served is refused before the first is measured
            replace(candidate, shape=shape)
        results = []
        for result in sweep(plain, candidate, shapes, repeats, sampling, options.out / "logs", steps):
            results.append(result)
            rate, gain = result.tokens_per_s.median, result.speedup.median
            steps.log(f"{result.shape}: {rate:.1f} tokens/s, {gain:.2f}x")
        title = f"{options.mode} worker, bf16, one request at a time, {len(repeats)} repeats"
        steps.console.print(sweep_table(results, title))
        return 0

    return exit_status("bench", steps.console, command)
