"""`eagle-plugin demo`: plain decoding, the engine's own speculation and the plugin's on the same questions."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_plugin.bench.choices import add_model_options, parse_shape, resolve_head, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import LoadError, Sampling, accept_length, ask_all, engine_version
from eagle_plugin.bench.machine import busy_percent, describe_machine, usable_cores
from eagle_plugin.bench.measure import Series, Turn, measure_interleaved, ratio_spread, spread, warm_up
from eagle_plugin.bench.prompts import Prompt, deal_rounds, read_prompts
from eagle_plugin.bench.report import (
    DemoReport,
    Equality,
    Settings,
    SpreadDetail,
    demo_table,
    plain_figures,
    quartiles,
    speculative_figures,
    write_json,
)
from eagle_plugin.bench.servers import Server, ServerError, check_worker, sigterm_as_exit
from eagle_plugin.bench.spec import Mode, ServerSpec, TreeShape

BUSY_LIMIT = 10.0  # percent of all cores


class SpeedPhase(NamedTuple):
    """What the bf16 phase found."""

    series: dict[Mode, Series]
    engine_version: str
    plugin_line: str
    busy_percent: float


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The demo's options."""
    parser = argparse.ArgumentParser(prog="eagle-plugin demo", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON-lines files; examples/prompts/*.jsonl if absent")
    parser.add_argument("--steps", type=int, help="plugin: depth of the draft tree")
    parser.add_argument("--topk", type=int, help="plugin: children of a node")
    parser.add_argument("--draft-tokens", type=int, help="plugin: nodes verified, the root included")
    parser.add_argument("--builtin", type=parse_shape, metavar="S/K/N", help="the engine's own steps/topk/tokens")
    parser.add_argument("--max-tokens", type=int, default=128, help="answer length in the speed rounds")
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--passes", type=int, default=1, help="times that the whole question set is asked")
    parser.add_argument("--quick", action="store_true", help="few questions and short answers: a trial, not a result")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the report and of logs/")
    options = parser.parse_args(argv)
    engine = ENGINES[options.engine]
    for name, best in engine.plugin_shape._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, best)
    options.builtin = options.builtin or engine.builtin_shape
    if options.threads is None:
        options.threads = engine.default_threads(usable_cores())
    for name in ("max_tokens", "threads", "passes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, wanted at least 1")
    return options


@contextlib.contextmanager
def serving(specs: dict[Mode, ServerSpec], logs: Path, console: Console) -> Iterator[dict[Mode, Server]]:
    """Start all servers together, check who serves, and leave them paused; all of them are stopped at the end."""
    with contextlib.ExitStack() as stack:
        servers = {mode: stack.enter_context(Server.of(spec, logs)) for mode, spec in specs.items()}
        with console.status("starting") as status:
            for mode, server in servers.items():
                seconds = server.wait_ready(progress=status.update)
                said = check_worker(server, mode)
                console.print(f"[green]up[/] {server.label} after {seconds:.0f} s  [dim]{escape(said)}[/]")
                server.pause()
        yield servers


def show_live(server: Server, prompts: Sequence[Prompt], max_tokens: int, console: Console) -> None:
    """Ask a few questions and let the answers appear as they stream in."""
    server.resume()
    for prompt in prompts:
        console.print(f"\n[bold cyan]{escape(prompt.prompt)}[/]")
        answer = ask_all(
            server.endpoint,
            [prompt],
            Sampling(max_tokens=max_tokens),
            on_text=lambda piece: console.print(piece, end="", markup=False, highlight=False, soft_wrap=True),
        )[0]
        length = accept_length([answer])
        told = f", {length:.2f} tokens a round" if length else ""
        console.print(f"\n[dim]{answer.completion_tokens} tokens in {answer.total_s:.1f} s{told}[/]")
    server.pause()
    console.print()


def measure_speed(
    specs: dict[Mode, ServerSpec], rounds: Sequence[Sequence[Prompt]], options: argparse.Namespace, console: Console
) -> SpeedPhase:
    """The bf16 phase: live answers, warm-up, interleaved rounds."""
    with serving(specs, options.out / "logs", console) as servers:
        worker = check_worker(servers["plugin"], "plugin")
        show_live(servers["plugin"], rounds[0], min(96, options.max_tokens), console)
        with console.status("warming up") as status:
            for server in servers.values():
                status.update(f"warming up {server.label}")
                server.resume()
                warm_up(server, rounds[0])
                version = engine_version(server.endpoint)
                server.pause()
        busy = busy_percent()
        if busy > BUSY_LIMIT:
            console.print(f"[bold yellow]other processes use {busy:.0f} % of this machine: the figures will be off[/]")
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        with bar:
            task = bar.add_task("measuring", total=len(rounds) * len(servers))

            def advance(mode: Mode, number: int, turn: Turn) -> None:
                bar.update(task, advance=1, description=f"round {number + 1}: {mode} {turn.tokens_per_s:.1f} tokens/s")

            series = measure_interleaved(servers, rounds, Sampling(max_tokens=options.max_tokens), advance)
    return SpeedPhase(series, version, worker, busy)


def compare_texts(
    specs: dict[Mode, ServerSpec], prompts: Sequence[Prompt], max_tokens: int, logs: Path, console: Console
) -> list[str]:
    """The fp32 phase: greedy answers of plain decoding and of the plugin; returns the ids of questions that differ."""
    sampling = Sampling(max_tokens=max_tokens)
    texts: dict[Mode, list[str]] = {}
    with serving(specs, logs, console) as servers:
        for mode, server in servers.items():
            with console.status(f"{server.label}: {len(prompts)} greedy answers of {max_tokens} tokens"):
                server.resume()
                texts[mode] = [completion.text for completion in ask_all(server.endpoint, prompts, sampling)]
                server.pause()
    both = zip(prompts, texts["plain"], texts["plugin"], strict=True)
    return [prompt.id for prompt, plain, plugin in both if plain != plugin]


def run(options: argparse.Namespace, console: Console) -> DemoReport:
    """Everything from preparing the target to the finished report."""
    target = resolve_target(options.target, console)
    head = resolve_head(options.head)
    prompts = read_prompts(options.prompts or sorted(Path("examples/prompts").glob("*.jsonl")))
    rounds = deal_rounds(prompts) * options.passes
    equality_tokens = 64
    if options.quick:
        rounds, prompts, options.max_tokens, equality_tokens = rounds[:2], prompts[::8], min(options.max_tokens, 32), 32
    shape = TreeShape(options.steps, options.topk, options.draft_tokens)
    base = ServerSpec(target=target, mode="plain", engine=options.engine, threads=options.threads)
    specs: dict[Mode, ServerSpec] = {
        "plain": base,
        "builtin": replace(base, mode="builtin", head=head, shape=options.builtin),
        "plugin": replace(base, mode="plugin", head=head, shape=shape),
    }
    console.rule("Speed in bf16")
    series, version, worker, busy = measure_speed(specs, rounds, options, console)
    console.rule("Equality in fp32")
    exact: dict[Mode, ServerSpec] = {mode: replace(specs[mode], dtype="float32") for mode in ("plain", "plugin")}
    different = compare_texts(exact, prompts, equality_tokens, options.out / "logs", console)

    rates = {mode: one.tokens_per_s for mode, one in series.items()}
    over_plain = ratio_spread(rates["plugin"], rates["plain"])
    over_builtin = ratio_spread(rates["plugin"], rates["builtin"])
    same = {
        mode: sum(a == b for a, b in zip(series["plain"].texts, series[mode].texts, strict=True))
        for mode in ("builtin", "plugin")
    }
    return DemoReport(
        engine=options.engine,
        engine_version=version,
        target=target.name,
        head=head.name,
        prompts=len(prompts),
        greedy_equal=not different,
        plain=plain_figures(series["plain"]),
        builtin=speculative_figures(series["builtin"], "builtin"),
        plugin=speculative_figures(series["plugin"], "plugin"),
        speedup_vs_plain=round(over_plain.median, 3),
        speedup_vs_builtin=round(over_builtin.median, 3),
        equality=Equality(
            max_tokens=equality_tokens,
            equal=len(prompts) - len(different),
            compared=len(prompts),
            different=different,
            bf16_builtin_equal=same["builtin"],
            bf16_plugin_equal=same["plugin"],
            bf16_compared=len(series["plain"].texts),
        ),
        spread=SpreadDetail(
            plain_tokens_per_s=quartiles(spread(rates["plain"])),
            builtin_tokens_per_s=quartiles(spread(rates["builtin"])),
            plugin_tokens_per_s=quartiles(spread(rates["plugin"])),
            builtin_speedup_vs_plain=quartiles(ratio_spread(rates["builtin"], rates["plain"])),
            speedup_vs_plain=quartiles(over_plain),
            speedup_vs_builtin=quartiles(over_builtin),
        ),
        settings=Settings(
            max_tokens=options.max_tokens,
            repeats=len(rounds),
            prompts_measured=len(series["plain"].texts),
            threads=options.threads,
            algorithm=base.algorithm,
            plugin_shape=str(shape),
            builtin_shape=str(options.builtin),
            plugin_worker=worker,
            quick=options.quick,
            busy_percent=busy,
        ),
        versions=installed_versions(
            ("eagle-plugin", *ENGINES[options.engine].distributions, "torch", "transformers", "openai")
        ),
        machine=describe_machine(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of those distributions that are installed beside this one."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the greedy texts were equal, 1 otherwise or on a failure, whose message is printed."""
    options = parse(argv)
    console = Console()
    with sigterm_as_exit():
        try:
            report = run(options, console)
        except (ServerError, LoadError, ValueError) as error:
            console.print(f"[bold red]demo failed:[/] {escape(str(error))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("\nstopped; all servers are down")
            return 130
    path = options.out / ("demo.json" if options.engine == "sglang" else f"demo-{options.engine}.json")
    write_json(report, path)
    console.print(demo_table(report))
    console.print(f"written to {path}")
    if not report.greedy_equal:
        console.print(f"[bold red]texts differ in fp32:[/] {', '.join(report.equality.different)}")
    return 0 if report.greedy_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
