"""The serving benchmark: tokens per second and processor time per token of several servers under load."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.choices import check_engine, resolve_target
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.serving.configs import CONFIGS, config_specs
from eagle_plugin.bench.serving.measure import Measured, measure_plan, resume_from, warm_up_under_load
from eagle_plugin.bench.serving.outputs import draw, now, report_path, save, steal_count, versions
from eagle_plugin.bench.serving.picture import draw_serving
from eagle_plugin.bench.serving.plan import Plan, make_plan
from eagle_plugin.bench.serving.preparation import add_server_options, at_least, base_spec, check_busy, version_of
from eagle_plugin.bench.serving.prompts import PROMPT_KINDS, questions_of
from eagle_plugin.bench.serving.report import ServingReport, ServingSettings, build_rows, summarise
from eagle_plugin.bench.serving.table import serving_table, summary_lines
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving
from eagle_plugin.common.command_line import Parser

EXPLANATION = """\
A cell is a number of clients, a temperature and a kind of prompts. In a cell one server at a time answers; all others
are paused (SIGSTOP). Each client asks its next question of the common list as soon as its last answer is complete.
Only the time in which all clients are busy is counted. Every repeat measures all servers, in another order each time.

servers (--configs):
  plain          the engine without speculation
  builtin_chain  the engine's own EAGLE-3 worker with a chain of 2 drafts
  builtin_tree   the engine's own worker with its best small tree (SGLang only)
  fixed          the plugin, with the same tree in every round (EAGLE_POLICY=fixed)
  plugin         the plugin, which chooses the shape of every round (EAGLE_POLICY=auto, the default)

prompts (--prompts):
  mixed          chat, code and maths in turn: the shipped questions
  chat, code, maths
  long           2,000 tokens of Python's language reference, and a task about them

Without --temperatures and --prompts: mixed prompts at T 0 for every number of clients, mixed prompts at T 0.7 for
1, 8 and 32, and long prompts at T 0 for 1 and 4. With one of them: every combination of what is named.
"""
EXAMPLES = """
examples:
  make bench ARGS=--quick
  make bench ENGINE=vllm ARGS='--concurrency 1 8 --configs plain fixed plugin'
  make bench ARGS='--prompts code chat --temperatures 0 0.7 --repeats 3'
  make bench ARGS=--resume                  continue after an interruption
  make bench ARGS=--trace                   load that rises and falls; see --trace --help
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = Parser(
        prog="serving.py",
        description=f"{__doc__}\n\n{EXPLANATION}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument(
        "--concurrency", type=at_least(1), nargs="+", metavar="N", help="numbers of clients (default: 1 2 4 8 16 32)"
    )
    parser.add_argument("--temperatures", type=at_least(0, float), nargs="+", metavar="T", help="default: see above")
    parser.add_argument("--prompts", choices=PROMPT_KINDS, nargs="+", help="default: see above")
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help="of every cell (default: 4, others 3)")
    parser.add_argument("--configs", choices=CONFIGS, nargs="+", help="servers to measure (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="1, 4 and 16 clients, short answers, 2 repeats: a trial, not a result"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run with the same options measured"
    )
    parser.add_argument("--trace", action="store_true", help="the trace instead of the cells; --trace --help explains")
    return parser.parse_args(argv)


def run(options: argparse.Namespace, path: Path, steps: Steps) -> ServingReport:
    """Start the servers, measure the plan, and return the report. Raises ServerError, LoadError or ValueError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    plan = make_plan(options.concurrency, options.temperatures, options.prompts, options.repeats, options.quick)
    questions = {kind: questions_of(kind, target) for kind in dict.fromkeys(cell.prompts for cell in plan.repeats)}
    base = base_spec(options, target, plan.max_concurrency, plan.cache_tokens())
    specs = config_specs(base, options.configs)
    if not specs:
        raise ValueError(f"--configs: {options.engine} has no {' and no '.join(options.configs)}; name others")
    identity = identify(specs, plan)
    partial = partial_path(path)
    measured = resume_from(partial, identity, Measured) if options.resume else Measured(identity=identity)
    save(measured, partial)  # now, and not after the servers have started, if the folder cannot be written
    with serving(specs, options.out / "logs", steps) as servers:
        temperatures = sorted({cell.temperature for cell in plan.repeats})
        warm_up_under_load(servers, questions_of("mixed", target), plan.max_concurrency, temperatures, steps)
        version, busy = version_of(next(iter(servers.values()))), check_busy(steps)
        watch = measure_plan(servers, plan, questions, measured, partial, steps)
    rows = build_rows(options.engine, measured.measurements)
    assert base.head is not None
    return ServingReport(
        engine=options.engine,
        engine_version=version,
        target=target.name,
        head=base.head.name,
        rows=rows,
        summary=summarise(rows, measured.measurements),
        steal=steal_count(watch),
        settings=ServingSettings(
            device=base.device,
            threads=base.threads or 0,
            shapes={config: str(spec.shape) for config, spec in specs.items() if spec.mode != "plain"},
            answer_length=plan.length,
            cache_tokens=base.max_total_tokens,
            busy_percent=busy,
        ),
        versions=versions(options.engine),
        machine=describe_machine(),
        date=now(),
        measurements=measured.measurements,
    )


def partial_path(path: Path) -> Path:
    """The file of the measurements until the report is complete."""
    return path.with_suffix(".measured.json")


def identify(specs: Mapping[Any, ServerSpec], plan: Plan) -> dict[str, str]:
    """What measurements must have in common to be in one report."""
    base = next(iter(specs.values()))
    return {
        "engine": base.engine,
        "target": str(base.target),
        "head": str(base.head),
        "servers": ", ".join(f"{config} {spec.shape}" for config, spec in specs.items()),
        "threads": str(base.threads),
        "cache": str(base.max_total_tokens),
        "answer length": str(plan.length),
        "machine": describe_machine().cpu,
        "versions": ", ".join(f"{name} {version}" for name, version in versions(base.engine).items()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the report and the picture; 1 after a failure, whose message is printed."""
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        path = report_path(options.out, "serving", options.engine)
        report = run(options, path, steps)
        save(report, path)
        partial_path(path).unlink(missing_ok=True)
        steps.console.print(serving_table(report))
        for line in summary_lines(report):
            steps.log(escape(line))
        draw(report, draw_serving, path, steps)
        return 0

    return exit_status("the serving benchmark", steps.console, command)
