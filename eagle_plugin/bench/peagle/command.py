"""The benchmark of P-EAGLE: draft time, tokens per second and accept length with 3, 7 and 11 levels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.choices import check_engine, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.peagle.configs import FORMS, KS, MOST_LEVELS, PreparedHead, group_specs
from eagle_plugin.bench.peagle.measure import Group, Measured, measure_group, sum_of
from eagle_plugin.bench.peagle.picture import draw_peagle
from eagle_plugin.bench.peagle.report import PEagleReport, build_rows, draft_time_ratio
from eagle_plugin.bench.peagle.table import peagle_table, summary_lines
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.serving.command import partial_path
from eagle_plugin.bench.serving.measure import resume_from
from eagle_plugin.bench.serving.outputs import draw, now, report_path, save, versions
from eagle_plugin.bench.serving.plan import Plan, make_plan
from eagle_plugin.bench.serving.preparation import add_server_options, at_least, base_spec, check_busy
from eagle_plugin.bench.serving.prompts import PROMPT_KINDS, questions_of
from eagle_plugin.bench.serving.report import ServingSettings
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.errors import UserError

# (target, the EAGLE-3 head, the P-EAGLE head or None, untrained, folder for a copy, the most levels) -> the head
Prepare = Callable[[Path, Path, Path | None, bool, Path, int], PreparedHead]
REPEATS, QUICK_REPEATS = 3, 2
QUICK_CLIENTS, QUICK_KS = (1, 4), (3, 11)
SERVER_GIB = 2.0  # of one server of the default target, about

EXPLANATION = """\
Every server drafts one shape in all rounds (EAGLE_POLICY=fixed). With K levels a chain is K/1/K+1, and a tree is
K/2/2K+2: two children per node and twice the nodes of the chain. An EAGLE-3 head needs one forward per level after
the first, a P-EAGLE head one forward for all of them.

The servers of one form (chains, then trees) run at the same time, plain decoding among them, and all but one are
paused (SIGSTOP). Each repeat measures all of them under the same questions, in another order each time; ratios are
taken repeat by repeat. Clients ask in a closed loop, and only the time in which all are busy is counted.

draft_ms is the mean time in which the server drafts a round of its batch (EAGLE_DRAFT_TIMES=1), and
draft_time_ratio_k11_over_k3 compares the P-EAGLE head's chains of 11 and of 3 levels at the fewest clients.

A P-EAGLE head is served with more levels than it was trained for where --ks asks for them: the servers get a copy
without the record of its training. --untrained makes one of the EAGLE-3 head, with a new mask_hidden: its draft time
is that of a trained head of {layers} layers, its accept length and tokens per second say nothing.
"""
EXAMPLES = """
examples:
  make bench-peagle                                        all servers, 1 to 32 clients (about an hour)
  make bench-peagle ARGS=--quick                           3 and 11 levels, 1 and 4 clients: a trial of ten minutes
  make bench-peagle ENGINE=vllm ARGS='--forms chain --concurrency 1 8'
  make bench-peagle ARGS='--untrained --quick'             draft time only, without a P-EAGLE head
  make bench-peagle ARGS='--peagle-head heads/mine --ks 3 5 8'
  make bench-peagle ARGS=--resume                          continue after an interruption
"""


def parse(argv: Sequence[str] | None, default_peagle: Path, layers: int) -> argparse.Namespace:
    """The benchmark's options."""
    parser = Parser(
        prog="peagle.py",
        description=f"{__doc__}\n\n{EXPLANATION.format(layers=layers)}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--peagle-head", type=Path, help=f"the P-EAGLE head's folder (default: {default_peagle})")
    heads.add_argument("--untrained", action="store_true", help="make one of the EAGLE-3 head: draft time only")
    parser.add_argument("--ks", type=_levels, nargs="+", metavar="K", help="levels (default: 3 7 11)")
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=list(FORMS), help="default: chain tree")
    parser.add_argument(
        "--concurrency", type=at_least(1), nargs="+", metavar="N", help="numbers of clients (default: 1 2 4 8 16 32)"
    )
    parser.add_argument(
        "--prompts", choices=PROMPT_KINDS, nargs="+", default=["mixed"], help="default: mixed (chat, code, maths)"
    )
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help="of every measurement (default: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="3 and 11 levels, 1 and 4 clients, short answers, 2 repeats: a trial"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run with the same options measured"
    )
    return parser.parse_args(argv)


def _levels(text: str) -> int:
    value: int = at_least(2)(text)
    if value > MOST_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} was given, wanted 2 to {MOST_LEVELS} levels")
    return value


def run(options: argparse.Namespace, path: Path, steps: Steps, prepare: Prepare, default: Path) -> PEagleReport:
    """Start the servers, measure, and return the report. Raises ServerError, LoadError, ValueError or UserError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    ks = sorted(set(options.ks or (QUICK_KS if options.quick else KS)))
    clients = options.concurrency or (QUICK_CLIENTS if options.quick else None)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    plan = make_plan(clients, [0.0], options.prompts, repeats, options.quick)
    questions = {kind: questions_of(kind, target) for kind in options.prompts}
    base = base_spec(options, target, plan.max_concurrency, plan.cache_tokens())
    assert base.head is not None
    given = None if options.untrained else options.peagle_head or default
    head = prepare(target, base.head, given, options.untrained, options.out / "peagle-head", max(ks))
    forms = list(dict.fromkeys(options.forms))
    groups = [Group(form, ks, group_specs(base, head.folder.resolve(), form, ks)) for form in forms]
    identity = identify(groups, base, head, plan)
    partial = partial_path(path)
    measured = resume_from(partial, identity, Measured) if options.resume else Measured(identity=identity)
    save(measured, partial)
    _check_memory(max(len(group.specs) for group in groups), steps)
    busy, installed, steals = check_busy(steps), versions(options.engine), []
    names = ENGINES[options.engine].distributions
    version = next((installed[name] for name in names if name in installed), "unknown")  # if nothing is left to measure
    for group in groups:
        if not group.is_measured(plan, measured):
            version, steal = measure_group(group, plan, questions, measured, partial, options.out / "logs", steps)
            steals.append(steal)
    rows = build_rows(options.engine, measured.measurements)
    shapes = {name: str(spec.shape) for group in groups for name, spec in group.specs.items() if spec.mode != "plain"}
    return PEagleReport(
        draft_time_ratio_k11_over_k3=draft_time_ratio(rows, "peagle"),
        draft_time_ratio_k11_over_k3_eagle3=draft_time_ratio(rows, "eagle3"),
        engine=options.engine,
        engine_version=version,
        target=target.name,
        head=base.head.name,
        peagle_head=head.name,
        peagle_is_trained=head.is_trained,
        peagle_trained_levels=head.trained_levels,
        rows=rows,
        steal=sum_of(steals),
        settings=ServingSettings(
            device=base.device,
            threads=base.threads or 0,
            shapes=shapes,
            answer_length=plan.length,
            cache_tokens=base.max_total_tokens,
            busy_percent=busy,
        ),
        versions=installed,
        machine=describe_machine(),
        date=now(),
        measurements=measured.measurements,
    )


def identify(groups: Sequence[Group], base: ServerSpec, head: PreparedHead, plan: Plan) -> dict[str, str]:
    """What measurements must have in common to be in one report."""
    names: Mapping[str, str] = versions(base.engine)
    return {
        "engine": base.engine,
        "target": str(base.target),
        "head": str(base.head),
        "P-EAGLE head": head.name,
        "servers": ", ".join(name for group in groups for name in group.specs),
        "threads": str(base.threads),
        "cache": str(base.max_total_tokens),
        "cells": ", ".join(f"{cell} x {repeats}" for cell, repeats in plan.repeats.items()),
        "answer length": str(plan.length),
        "machine": describe_machine().cpu,
        "versions": ", ".join(f"{name} {version}" for name, version in names.items()),
    }


def _check_memory(servers: int, steps: Steps) -> None:
    """Warn where so many servers of the default target hardly fit into the free memory."""
    free, wanted = psutil.virtual_memory().available / 2**30, servers * SERVER_GIB
    if free < wanted:
        steps.log(
            f"[bold yellow]{free:.0f} GiB of memory are free, {servers} servers need about {wanted:.0f} GiB: "
            "if one is ended, name fewer levels (--ks)[/]"
        )


def main(argv: Sequence[str] | None, prepare: Prepare, default_peagle: Path, layers: int) -> int:
    """Measure, print the table, write the report and the picture; 1 after a failure, whose message is printed.

    default_peagle: the folder of the P-EAGLE head without --peagle-head. layers: of an untrained one.
    """
    options = parse(argv, default_peagle, layers)
    steps = Steps(Console())

    def command() -> int:
        path = report_path(options.out, "peagle", options.engine)
        try:
            report = run(options, path, steps, prepare, default_peagle)
        except UserError as error:
            raise ValueError(str(error)) from error
        save(report, path)
        partial_path(path).unlink(missing_ok=True)
        steps.console.print(peagle_table(report))
        for line in summary_lines(report):
            steps.log(escape(line))
        draw(report, draw_peagle, path, steps)
        return 0

    return exit_status("the benchmark of P-EAGLE", steps.console, command)
