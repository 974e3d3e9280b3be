"""`eagle-plugin benchmark`: serve a target without EAGLE, with the old and with the new head, and compare them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.cell_run import begin_run, identify
from eagle_plugin.bench.cells import Cell, Plan
from eagle_plugin.bench.choices import (
    ENGINE_FLAGS,
    add_device_option,
    check_engine,
    default_engine,
    parse_with_engine_flags,
    resolve_head,
    resolve_target,
)
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.measurement import Measured
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import StealCount, facts_of, settings_of
from eagle_plugin.bench.policy_sources import SourceError, read_report
from eagle_plugin.bench.preparation import CONTEXT_LENGTH, at_least, plain_spec
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.prompt_kinds import DRAFT_SLOTS, LONGEST
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.states.aiperf import find_aiperf, measure_by_aiperf
from eagle_plugin.bench.states.configs import WORKERS, state_specs
from eagle_plugin.bench.states.document import (
    PromptFacts,
    StateMeasurement,
    StatesReport,
    StatesSettings,
    build_rows,
    compare,
    verdict,
)
from eagle_plugin.bench.states.facts import head_facts, shown_arguments
from eagle_plugin.bench.states.prompts import SET_NAMES, prompt_sets
from eagle_plugin.bench.states.table import aiperf_table, states_table
from eagle_plugin.common.command_line import Parser
from eagle_plugin.heads.files import read_config, text_config
from eagle_plugin.heads.manifest import describe_target

STATES_FILE = "states.json"
TEMPLATE_TOKENS = 128  # of a chat template around a prompt, at most
CONCURRENCY = (1, 2, 4, 8)
DESCRIPTION = """\
Measure what a trained head gains under load. Up to three servers answer the same
questions: the target without EAGLE, with the base head (if --base-head names one)
and with the trained head. One server at a time answers and the others are paused.
Every repeat measures all of them, in another order each time. The result is
OUT/states.json; `eagle-plugin report OUT` makes a page of it.
"""
EPILOG = f"""\
examples:
  eagle-plugin benchmark TARGET --head out/head/head --prompts out/head/prompts.jsonl --out out/benchmark
  eagle-plugin benchmark TARGET --head NEW --base-head OLD --concurrency 1 4 16 --engine vllm --out out/benchmark
  eagle-plugin benchmark TARGET --head NEW --sets shipped --concurrency 1 --repeats 3 --out out/trial    a short trial
  eagle-plugin benchmark TARGET --head NEW --aiperf --out out/benchmark  and the same load by aiperf
  eagle-plugin benchmark TARGET --head NEW --out out/benchmark -- --tensor-parallel-size 2
  eagle-plugin benchmark ... --resume                                    continue after an interruption

TTFT: time to the first token. TPOT: (end - first token) / (tokens - 1) of a request. ITL: time between two chunks of
a stream; with speculation a chunk has several tokens, so ITL is longer than TPOT. OTPS: tokens per second of a
request, 1 / TPOT. --prompts: a file of `eagle-plugin data prepare`; its prompts of split val are asked if it has any.

The defaults are 180 measurements: 4 numbers of clients, 3 sets, 5 repeats, 3 servers.
{ENGINE_FLAGS}"""


def run(options: argparse.Namespace, steps: Steps) -> StatesReport:
    """Start the servers, measure, and write OUT/states.json.

    Raises:
        ServerError, LoadError, ValueError, UserError: with one sentence for the user.
    """
    check_engine(options.engine, options.device)
    program = None if options.aiperf is None else find_aiperf(options.aiperf)
    target = resolve_target(options.target, steps.console)
    head = resolve_head(options.head, target, options.engine)
    base_head = None if options.base_head is None else resolve_head(options.base_head, target, options.engine)
    answer = round(options.max_tokens * LONGEST) + DRAFT_SLOTS
    context = min(CONTEXT_LENGTH, text_config(read_config(target)).get("max_position_embeddings") or CONTEXT_LENGTH)
    longest = context - answer - TEMPLATE_TOKENS
    if longest < 1:
        raise ValueError(f"--max-tokens {options.max_tokens} is too long for {context} tokens; give less")
    sets = prompt_sets(options.sets, options.prompts, target, options.limit, longest)
    cells = {
        Cell(n, options.temperature, name): options.repeats for name in sets for n in sorted(set(options.concurrency))
    }
    plan = Plan(cells, answer_tokens=options.max_tokens)
    tokens = plan.max_concurrency * (max(found.longest for found in sets.values()) + TEMPLATE_TOKENS + answer)
    plain = plain_spec(options.engine, target, options.device, options.threads, plan.max_concurrency, tokens, context)
    plain = replace(plain, extra_flags=options.engine_flags)
    specs = state_specs(plain, head, base_head, options.worker)
    heads = {state: head_facts(spec.head) for state, spec in specs.items() if spec.head is not None}
    path, questions = options.out / STATES_FILE, {name: found.questions for name, found in sets.items()}
    prompts = ", ".join(f"{name} {found.sha256}" for name, found in sets.items())
    temperature = f"{options.temperature:g}"
    identity = identify(specs, plan, worker=options.worker, prompts=prompts, temperature=temperature)
    kind, logs = Measured[StateMeasurement], options.out / "logs"
    one = begin_run(plan, questions, identity, kind, path, logs, steps, options.resume)
    with one.measure(specs, lambda state, fields: StateMeasurement(state=state, **fields)) as ran:
        by_aiperf = [] if program is None else measure_by_aiperf(
            program, ran.servers, plan, questions, target, options.out / "aiperf", steps
        )  # fmt: skip
        calibration = {state: factors for state, server in ran.servers.items() if (factors := _calibration(server))}
    ones = one.measured.measurements
    comparisons = compare(ones)
    report = StatesReport(
        **facts_of(options.engine),
        engine_version=ran.version,
        target=describe_target(target),
        heads=heads,
        verdict=verdict(comparisons, ones, f"{options.engine} {ran.version}"),
        comparisons=comparisons,
        rows=build_rows(ones),
        calibration=calibration,
        prompts={
            name: PromptFacts(questions=len(found.questions), sha256=found.sha256, left_out=found.left_out)
            for name, found in sets.items()
        },
        settings=StatesSettings(
            **settings_of(specs, ran.busy),
            worker=options.worker,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
        ),
        steal=StealCount.of(ran.watch),
        command=shown_arguments(options.command),
        measurements=ones,
        aiperf=by_aiperf,
    )
    tables = [states_table(report), *([aiperf_table(report)] if report.aiperf else [])]
    one.finish(report, tables, [])
    return report


def _calibration(server: Server) -> list[float]:
    """The factors in the last line of the server's policy; empty without a policy."""
    with contextlib.suppress(SourceError):
        return [round(factor, 4) for factor in read_report(str(server.log)).factors]
    return []


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = Parser(prog="eagle-plugin benchmark", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder of the target, or a name of `models list`")
    add("--head", required=True, metavar="NEW", help="the trained head: a folder, or a name of `models list`")
    add("--base-head", metavar="OLD", help="the head before training, or any head to compare with")
    add("--prompts", type=Path, metavar="FILE", help="your held-out prompts, a file of `data prepare`")
    standard = SET_NAMES[:-1]
    add("--sets", nargs="*", choices=SET_NAMES, default=standard, help=f"standard sets ({' '.join(standard)})")
    clients = " ".join(map(str, CONCURRENCY))
    add("--concurrency", type=at_least(1), nargs="+", metavar="N", default=CONCURRENCY, help=f"({clients})")
    engine = default_engine()
    add("--engine", choices=sorted(ENGINES), default=engine, help=f"default: {engine}")
    add_device_option(parser)
    worker = "who serves the heads: the plugin, the plugin with one tree, or the engine's own EAGLE (%(default)s)"
    add("--worker", choices=WORKERS, default="plugin", help=worker)
    add("--repeats", type=at_least(1), metavar="N", default=5, help="of every cell (%(default)s)")
    add("--max-tokens", type=at_least(2), metavar="N", default=64, help="of an answer (%(default)s)")
    add("--temperature", type=at_least(0, float), metavar="T", default=0.0, help="(%(default)s)")
    add("--limit", type=at_least(1), metavar="N", default=80, help="prompts of each set (%(default)s)")
    add("--threads", type=at_least(1), metavar="N", help="OpenMP threads of every server (all cores)")
    add("--out", type=Path, default=Path("out/benchmark"), metavar="DIR", help="folder of states.json (%(default)s)")
    add("--aiperf", nargs="?", const="", metavar="PATH", help="measure every cell once more by aiperf (docs)")
    add("--resume", action="store_true", help="keep what an interrupted run with the same options measured")
    options = parse_with_engine_flags(parser, argv)
    options.command = tuple(sys.argv[2:] if argv is None else argv)  # the arguments that the report tells
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdict; 1 after a failure, whose message is printed."""
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        report = run(options, steps)
        steps.log(f"[bold]{escape(report.verdict)}[/]")
        steps.log(f"written to {escape(str(options.out / STATES_FILE))}; for a page: eagle-plugin report {options.out}")
        return 0

    return exit_status("benchmark", steps.console, command)
