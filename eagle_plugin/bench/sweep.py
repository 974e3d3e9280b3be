"""Try tree shapes one after another, each interleaved with plain decoding, to find the best setting of a worker."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle_plugin.bench.choices import add_model_options, parse_shape, resolve_head, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import LoadError, Sampling
from eagle_plugin.bench.machine import usable_cores
from eagle_plugin.bench.measure import Spread, measure_interleaved, ratio_spread, spread, warm_up
from eagle_plugin.bench.prompts import Prompt, deal_rounds, read_prompts
from eagle_plugin.bench.servers import Server, ServerError, check_worker, sigterm_as_exit
from eagle_plugin.bench.spec import ServerSpec, TreeShape


class ShapeResult(NamedTuple):
    """What one shape reached."""

    shape: TreeShape
    tokens_per_s: Spread
    speedup: Spread  # over plain decoding, round by round
    accept_length: float | None


def sweep(
    plain: ServerSpec,
    candidate: ServerSpec,
    shapes: Sequence[TreeShape],
    rounds: Sequence[Sequence[Prompt]],
    sampling: Sampling,
    logs: Path,
    console: Console,
) -> Iterator[ShapeResult]:
    """Serve `candidate` with each shape in turn beside one plain server, and yield each result as it is there."""
    with Server.of(plain, logs) as base:
        with console.status("starting") as status:
            base.wait_ready(progress=status.update)
        warm_up(base, rounds[0])
        base.pause()
        for shape in shapes:
            with Server.of(replace(candidate, shape=shape), logs) as server, console.status("starting") as status:
                server.wait_ready(progress=status.update)
                check_worker(server, candidate.mode)
                status.update(f"measuring {shape}")
                warm_up(server, rounds[0])
                server.pause()
                series = measure_interleaved({"plain": base, "ours": server}, rounds, sampling)
            yield ShapeResult(
                shape,
                spread(series["ours"].tokens_per_s),
                ratio_spread(series["ours"].tokens_per_s, series["plain"].tokens_per_s),
                series["ours"].accept_length,
            )


def sweep_table(results: Sequence[ShapeResult], title: str) -> Table:
    """One row a shape, the fastest marked."""
    best = max(results, key=lambda result: result.speedup.median)
    table = Table("steps/topk/tokens", "tokens/s", "speed-up over plain [quartiles]", "accept length", title=title)
    for result in results:
        length = "-" if result.accept_length is None else f"{result.accept_length:.2f}"
        table.add_row(
            str(result.shape),
            f"{result.tokens_per_s.median:.1f}",
            escape(f"{result.speedup.median:.2f}x [{result.speedup.q1:.2f}-{result.speedup.q3:.2f}]"),
            length,
            style="bold green" if result is best else "",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep and print the table."""
    parser = argparse.ArgumentParser(prog="eagle-plugin bench", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--mode", choices=["builtin", "plugin"], default="builtin", help="whose worker to tune")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", metavar="S/K/N")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of one question a group")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args(argv)
    console = Console()
    with sigterm_as_exit():
        try:
            target = resolve_target(options.target, console)
            threads = options.threads or ENGINES[options.engine].default_threads(usable_cores())
            plain = ServerSpec(target=target, mode="plain", engine=options.engine, threads=threads)
            candidate = replace(plain, mode=options.mode, head=resolve_head(options.head))
            rounds = deal_rounds(read_prompts(sorted(Path("examples/prompts").glob("*.jsonl"))))[: options.rounds]
            sampling = Sampling(max_tokens=options.max_tokens)
            shapes = options.shapes or ENGINES[options.engine].sweep_shapes[options.mode]
            results = []
            for result in sweep(plain, candidate, shapes, rounds, sampling, options.out / "logs", console):
                results.append(result)
                rate, gain = result.tokens_per_s.median, result.speedup.median
                console.print(f"{result.shape}: {rate:.1f} tokens/s, {gain:.2f}x")
        except (ServerError, LoadError, ValueError) as error:
            console.print(f"[bold red]sweep failed:[/] {escape(str(error))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("\nstopped; all servers are down")
            return 130
    console.print(sweep_table(results, f"{options.mode} worker, bf16, one request at a time, {len(rounds)} rounds"))
    return 0
