"""`eagle-plugin bench-serving`: tokens per second and processor time per token of several servers under load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from eagle_plugin.bench.cell_run import begin_run, identify
from eagle_plugin.bench.cells import make_plan
from eagle_plugin.bench.choices import ENGINE_FLAGS, check_engine, parse_with_engine_flags, resolve_target
from eagle_plugin.bench.measurement import Measured
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import StealCount, facts_of, report_path, settings_of
from eagle_plugin.bench.preparation import add_server_options, at_least, base_spec
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.prompt_kinds import PROMPT_KINDS, questions_of
from eagle_plugin.bench.serving.configs import CONFIGS, config_specs
from eagle_plugin.bench.serving.picture import draw_serving
from eagle_plugin.bench.serving.report import (
    ServingMeasurement,
    ServingReport,
    ServingSettings,
    build_rows,
    summarise,
)
from eagle_plugin.bench.serving.table import serving_table, summary_lines
from eagle_plugin.common.command_line import Parser

DESCRIPTION = """\
Measure plain decoding, the engine's own EAGLE and the plugin under load. The result is OUT/serving.json.
"""
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
EXAMPLES = f"""
examples:
  eagle-plugin bench-serving --quick
  eagle-plugin bench-serving --target TARGET --head HEAD --concurrency 1 8 --configs plain builtin_chain plugin
  eagle-plugin bench-serving --prompts code chat --temperatures 0 0.7 --repeats 3
  eagle-plugin bench-serving --resume       continue after an interruption
  eagle-plugin bench-serving --trace        load that rises and falls; see --trace --help
  eagle-plugin bench-serving --target TARGET --head HEAD -- --tp-size 2

{ENGINE_FLAGS}"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = Parser(prog="eagle-plugin bench-serving", description=f"{DESCRIPTION}\n{EXPLANATION}", epilog=EXAMPLES)
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
    return parse_with_engine_flags(parser, argv)


def run(options: argparse.Namespace, steps: Steps) -> None:
    """Start the servers, measure the plan, and write the report. Raises ServerError, LoadError or ValueError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    plan = make_plan(options.concurrency, options.temperatures, options.prompts, options.repeats, options.quick)
    questions = {kind: questions_of(kind, target) for kind in dict.fromkeys(cell.prompts for cell in plan.repeats)}
    base = base_spec(options, target, plan.max_concurrency, plan.cache_tokens())
    specs = config_specs(base, options.configs)
    if not specs:
        raise ValueError(f"--configs: {options.engine} has no {' and no '.join(options.configs)}; name others")
    path = report_path(options.out, "serving", options.engine)
    kind, identity = Measured[ServingMeasurement], identify(specs, plan)
    one = begin_run(plan, questions, identity, kind, path, options.out / "logs", steps, options.resume)
    with one.measure(specs, lambda config, fields: ServingMeasurement(config=config, **fields)) as ran:
        pass
    measurements = one.measured.measurements
    rows = build_rows(options.engine, measurements)
    assert base.head is not None
    report = ServingReport(
        **facts_of(options.engine),
        engine_version=ran.version,
        target=target.name,
        head=base.head.name,
        rows=rows,
        summary=summarise(rows, measurements),
        steal=StealCount.of(ran.watch),
        settings=ServingSettings(
            **settings_of(specs, ran.busy), answer_length=plan.length, cache_tokens=base.max_total_tokens
        ),
        measurements=measurements,
    )
    one.finish(report, [serving_table(report)], summary_lines(report), draw_serving)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the report and the picture; 1 after a failure, whose message is printed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--trace" in arguments:
        from eagle_plugin.bench.serving import trace_command

        return trace_command.main([argument for argument in arguments if argument != "--trace"])
    options, steps = parse(arguments), Steps(Console())

    def command() -> int:
        run(options, steps)
        return 0

    return exit_status("bench-serving", steps.console, command)
