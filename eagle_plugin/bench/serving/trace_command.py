"""`eagle-plugin bench-serving --trace`: plain decoding, fixed shapes and the plugin while the load changes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.choices import (
    ENGINE_FLAGS,
    check_engine,
    parse_shape,
    parse_with_engine_flags,
    resolve_target,
)
from eagle_plugin.bench.drawing import GREY, draw_points, finish_axes, new_figure, save_figure
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import StealCount, draw, facts_of, report_path, save
from eagle_plugin.bench.preparation import add_server_options, at_least, base_spec, check_busy, version_of
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.prompt_kinds import questions_of, tokens_per_request
from eagle_plugin.bench.serving.trace import (
    ANSWER_TOKENS,
    QUICK_STEPS,
    STEPS,
    TraceReport,
    best_fixed,
    describe_server,
    measure_trace,
    trace_phases,
    trace_specs,
)
from eagle_plugin.bench.startup import serving
from eagle_plugin.bench.tables import with_quartiles
from eagle_plugin.bench.turns import warm_up_under_load
from eagle_plugin.common.command_line import Parser

REPEATS = 3
COLOURS = {"plain": GREY, "plugin": "#d9662b"}
FIXED_COLOURS = ("#5b7fa6", "#3c9d7b", "#8a63a8", "#b0a13a")
EXPLANATION = """\
Measure plain decoding, fixed shapes and the plugin while the load changes. The result is OUT/trace.json.

Every server answers the same questions under the same trace: 1, 4, 16, 32, 16, 4 and 1 clients, with prompts that
change from code to chat and back. A phase follows the other without a pause. Tokens count for the phase in which they
arrive. A fixed shape is best for one part of the trace; the plugin chooses the shape of every round.

servers:
  plain          the engine without speculation
  fixed S/K/N    the plugin with that tree in every round (EAGLE_POLICY=fixed): its usual tree, and those of --shapes
  plugin         the plugin, which chooses the shape of every round (EAGLE_POLICY=auto)
"""
EXAMPLES = """
examples:
  eagle-plugin bench-serving --trace
  eagle-plugin bench-serving --trace --shapes 1/1/2 3/4/16 --repeats 5
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The trace's options."""
    parser = Parser(
        prog="eagle-plugin bench-serving --trace", description=EXPLANATION, epilog=f"{EXAMPLES}\n{ENGINE_FLAGS}"
    )
    add_server_options(parser)
    parser.add_argument(
        "--shapes",
        type=parse_shape,
        nargs="+",
        default=[],
        metavar="S/K/N",
        help="further fixed shapes (default: none)",
    )
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help=f"of the trace (default: {REPEATS})")
    parser.add_argument("--quick", action="store_true", help="1, 8 and 1 clients, once: a trial, not a result")
    return parse_with_engine_flags(parser, argv)


def run(options: argparse.Namespace, steps: Steps) -> TraceReport:
    """Start the servers, run the trace, and return the report. Raises ServerError, LoadError or ValueError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    trace, tokens = (QUICK_STEPS, ANSWER_TOKENS // 2) if options.quick else (STEPS, ANSWER_TOKENS)
    clients = max(step.clients for step in trace)
    questions = {kind: questions_of(kind, target) for kind in {step.prompts for step in trace}}
    base = base_spec(options, target, clients, clients * tokens_per_request("mixed", tokens))
    specs = trace_specs(base, ENGINES[options.engine].plugin_shape(base.head, base.device, base.target), options.shapes)
    count = options.repeats or (1 if options.quick else REPEATS)
    repeats = [trace_phases(trace, questions, repeat, tokens) for repeat in range(count)]
    with serving(specs, options.out / "logs", steps) as servers:
        warm_up_under_load(servers, questions["code"], clients, (0.0,), steps)
        version = version_of(servers["plain"])
        check_busy(steps)
        windows, others, watch = measure_trace(servers, repeats, steps)
    best, ratio = best_fixed(windows)
    assert base.head is not None
    return TraceReport(
        **facts_of(options.engine),
        engine_version=version,
        target=target.name,
        head=base.head.name,
        repeats=count,
        servers={
            name: describe_server(trace, windows[name], windows["plain"], None if spec.mode == "plain" else spec.drafts)
            for name, spec in specs.items()
        },
        best_fixed=best,
        ratio_vs_best_fixed=ratio,
        steal=StealCount.of(watch),
        others=others,
        threads=base.threads or 0,
    )


def trace_table(report: TraceReport) -> Table:
    """One row per phase and one for the whole trace: tokens per second and accept length of each server."""
    table = Table(
        "clients",
        "prompts",
        *report.servers,
        title=f"{report.target}, {report.engine} {report.engine_version}: output tokens per second (accept length)",
        caption=f"medians of {report.repeats} repeats; {report.threads} threads on {report.machine.cpu}",
    )

    def cell(rate: float, length: float | None) -> str:
        return f"{rate:.1f}" if length is None else f"{rate:.1f} ({length:.2f})"

    servers = list(report.servers.values())
    for phases in zip(*(server.phases for server in servers), strict=True):
        cells = (cell(phase.tokens_per_s.median, phase.accept_length) for phase in phases)
        table.add_row(str(phases[0].clients), phases[0].prompts, *cells)
    table.add_section()
    totals = (cell(server.tokens_per_s.median, server.accept_length) for server in servers)
    table.add_row("all", "", *totals, style="bold")
    return table


def draw_trace(report: TraceReport, path: Path) -> None:
    """Write a PNG: tokens per second and accept length of every server over the phases. Raises PictureError."""
    figure = new_figure(9, 6, f"{report.target} in {report.engine} {report.engine_version}")
    rates, lengths = figure.subplots(2, 1, sharex=True)
    fixed_colours = itertools.cycle(FIXED_COLOURS)
    for name, server in report.servers.items():
        colour = COLOURS.get(name) or next(fixed_colours)
        style: dict[str, Any] = {"color": colour, "linewidth": 2.2 if name == "plugin" else 1.2}
        label = f"{name}: {server.tokens_per_s.median:.1f} in total"
        draw_points(rates, [(x, phase.tokens_per_s) for x, phase in enumerate(server.phases)], label, **style)
        known = [(x, phase.accept_length) for x, phase in enumerate(server.phases) if phase.accept_length is not None]
        lengths.plot([x for x, _ in known], [length for _, length in known], marker="o", **style)
    phases = next(iter(report.servers.values())).phases
    lengths.set_xticks(range(len(phases)), [f"{phase.clients}\n{phase.prompts}" for phase in phases])
    lengths.set_xlabel("clients and prompts, one phase after the other")
    rates.set_ylabel("tokens per second")
    lengths.set_ylabel("accept length")
    rates.set_ylim(bottom=0)
    rates.legend(fontsize=8, frameon=False)
    for axes in (rates, lengths):
        finish_axes(axes)
    save_figure(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trace, print the table, write the report and the picture; 1 after a failure, whose message is printed."""
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        path = report_path(options.out, "trace", options.engine)
        report = run(options, steps)
        save(report, path)
        steps.console.print(trace_table(report))
        if report.ratio_vs_best_fixed:
            steps.log(f"plugin / {report.best_fixed}: {with_quartiles(report.ratio_vs_best_fixed, 3)} over the trace")
        steps.log(report.steal.sentence())
        steps.log(f"other processes used at most {report.others:.0%} of the machine")
        draw(report, draw_trace, path, steps)
        return 0

    return exit_status("bench-serving", steps.console, command)
