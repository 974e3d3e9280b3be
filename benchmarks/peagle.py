"""Measures what drafting all levels at once costs and gives (`make bench-peagle`); `--help` explains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peagle_report import (
    FORMS,
    PEagleMeasurement,
    PEagleReport,
    build_rows,
    draft_time_ratio,
    draw_peagle,
    group_configs,
    group_specs,
    peagle_table,
    summary_lines,
)
from eagle_plugin.bench.cell_run import begin_run, identify
from eagle_plugin.bench.cells import make_plan
from eagle_plugin.bench.choices import check_engine, parse_with_engine_flags, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.measurement import Measured
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import StealCount, facts_of, report_path, settings_of
from eagle_plugin.bench.preparation import add_server_options, at_least, base_spec
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.prompt_kinds import PROMPT_KINDS, questions_of
from eagle_plugin.bench.serving.report import ServingSettings
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.common.command_line import Parser
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import trained_depths
from eagle_plugin.models.shipped import head_folder

SHIPPED = "smollm2-135m-instruct-peagle"
KS = (3, 7, 11)  # levels
MOST_LEVELS = 16  # of a P-EAGLE head in both engines
REPEATS, QUICK_REPEATS = 3, 2
QUICK_CLIENTS, QUICK_KS = (1, 4), (3, 11)
SERVER_GIB = 2.0  # of one server of the default target, about

EXPLANATION = """\
The benchmark of P-EAGLE: draft time, tokens per second and accept length with 3, 7 and 11 levels.

Every server drafts one shape in all rounds (EAGLE_POLICY=fixed). With K levels a chain is K/1/K+1, and a tree is
K/2/2K+2: two children per node and twice the nodes of the chain. An EAGLE-3 head needs one forward per level after
the first, a P-EAGLE head one forward for all of them.

The servers of one form (chains, then trees) run at the same time, plain decoding among them, and all but one are
paused (SIGSTOP). Each repeat measures all of them under the same questions, in another order each time; ratios are
taken repeat by repeat. Clients ask in a closed loop, and only the time in which all are busy is counted.

draft_ms is the mean time in which the server drafts a round of its batch (EAGLE_DRAFT_TIMES=1), and
draft_time_ratio_k11_over_k3 compares the P-EAGLE head's chains of 11 and of 3 levels at the fewest clients.

A P-EAGLE head is served with more levels than it was trained for where --ks asks for them: the servers get a copy
without the record of its training.
"""
EXAMPLES = """
examples:
  make bench-peagle                                        all servers, 1 to 32 clients (about an hour)
  make bench-peagle ARGS=--quick                           3 and 11 levels, 1 and 4 clients: a trial of ten minutes
  make bench-peagle ENGINE=vllm ARGS='--forms chain --concurrency 1 8'
  make bench-peagle ARGS='--peagle-head heads/mine --ks 3 5 8'
  make bench-peagle ARGS=--resume                          continue after an interruption
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = Parser(prog="peagle.py", description=EXPLANATION, epilog=EXAMPLES)
    add_server_options(parser)
    parser.add_argument("--peagle-head", default=SHIPPED, help=f"the P-EAGLE head's folder or name ({SHIPPED})")
    parser.add_argument("--ks", type=_levels, nargs="+", metavar="K", help="levels (default: 3 7 11)")
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=list(FORMS), help="default: chain tree")
    clients = "numbers of clients (default: 1 2 4 8 16 32)"
    parser.add_argument("--concurrency", type=at_least(1), nargs="+", metavar="N", help=clients)
    mixed = "default: mixed (chat, code, maths)"
    parser.add_argument("--prompts", choices=PROMPT_KINDS, nargs="+", default=["mixed"], help=mixed)
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help="of every measurement (default: 3)")
    quick = "3 and 11 levels, 1 and 4 clients, short answers, 2 repeats: a trial"
    parser.add_argument("--quick", action="store_true", help=quick)
    resume = "keep what an interrupted run with the same options measured"
    parser.add_argument("--resume", action="store_true", help=resume)
    return parse_with_engine_flags(parser, argv)


def _levels(text: str) -> int:
    value: int = at_least(2)(text)
    if value > MOST_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} was given, wanted 2 to {MOST_LEVELS} levels")
    return value


class PreparedHead(NamedTuple):
    """The P-EAGLE head of a run, as the servers get it."""

    folder: Path
    name: str
    trained_levels: int | None  # by the record of its training


def prepare_head(target: Path, given: str | Path, copy: Path, levels: int) -> PreparedHead:
    """The P-EAGLE head that the servers get. Raises HeadError.

    One whose record says that it was trained for fewer than `levels` would be served with so many only: `copy` is then
    written without the record.
    """
    folder = head_folder(given)
    if not (folder / "config.json").is_file():
        raise HeadError(
            f"there is no P-EAGLE head in {folder}; train one (make head KIND=peagle), or name another folder "
            "(--peagle-head)"
        )
    head = load_any_head(folder, target)
    if head.kind != "peagle":
        raise HeadError(f"--peagle-head {folder} is a head of kind {head.kind}, wanted peagle; name another folder")
    trained = trained_depths(folder)
    if trained is None or trained >= levels:
        return PreparedHead(folder, folder.name, trained)
    save_head(head, copy, target_dir=target)
    return PreparedHead(copy, folder.name, trained)


def run(options: argparse.Namespace, steps: Steps) -> None:
    """Start the servers, measure, and write the report. Raises ServerError, LoadError, ValueError or UserError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    ks = sorted(set(options.ks or (QUICK_KS if options.quick else KS)))
    clients = options.concurrency or (QUICK_CLIENTS if options.quick else None)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    plan = make_plan(clients, [0.0], options.prompts, repeats, options.quick)
    questions = {kind: questions_of(kind, target) for kind in options.prompts}
    base = base_spec(options, target, plan.max_concurrency, plan.cache_tokens())
    assert base.head is not None
    head = prepare_head(target, options.peagle_head, options.out / "peagle-head", max(ks))
    configs = {form: {str(config): config for config in group_configs(form, ks)} for form in options.forms}
    groups = {form: group_specs(base, head.folder.resolve(), form, ks) for form in options.forms}
    specs = {name: spec for group in groups.values() for name, spec in group.items()}
    path, logs = report_path(options.out, "peagle", options.engine), options.out / "logs"
    identity = identify(specs, plan, peagle_head=head.name)
    one = begin_run(plan, questions, identity, Measured[PEagleMeasurement], path, logs, steps, options.resume)
    _warn_of_memory(max(map(len, groups.values())), steps)
    facts = facts_of(options.engine)
    installed = [facts["versions"].get(name) for name in ENGINES[options.engine].distributions]
    version, busy = next(filter(None, installed), "unknown"), 0.0  # if nothing is left to measure
    watches: list[StealWatch] = []
    for form, group in groups.items():
        if one.is_missing(group):
            with one.measure(group, lambda name, fields, form=form: configs[form][name].measurement(fields)) as ran:  # type: ignore[misc]
                version, busy = ran.version, max(busy, ran.busy)
                watches.append(ran.watch)
    measurements = one.measured.measurements
    rows = build_rows(options.engine, measurements)
    report = PEagleReport(
        **facts,
        engine_version=version,
        draft_time_ratio_k11_over_k3=draft_time_ratio(rows, "peagle"),
        draft_time_ratio_k11_over_k3_eagle3=draft_time_ratio(rows, "eagle3"),
        target=target.name,
        head=base.head.name,
        peagle_head=head.name,
        peagle_trained_levels=head.trained_levels,
        rows=rows,
        steal=StealCount.of(*watches),
        settings=ServingSettings(
            **settings_of(specs, busy), answer_length=plan.length, cache_tokens=base.max_total_tokens
        ),
        measurements=measurements,
    )
    one.finish(report, [peagle_table(report)], summary_lines(report), draw_peagle)


def _warn_of_memory(servers: int, steps: Steps) -> None:
    """Warn where so many servers of the default target hardly fit into the free memory."""
    free, wanted = psutil.virtual_memory().available / 2**30, servers * SERVER_GIB
    if free < wanted:
        steps.log(
            f"[bold yellow]{free:.0f} GiB of memory are free, {servers} servers need about {wanted:.0f} GiB: "
            "if one is ended, name fewer levels (--ks)[/]"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the report and the picture; 1 after a failure, whose message is printed."""
    options, steps = parse(argv), Steps(Console())

    def command() -> int:
        run(options, steps)
        return 0

    return exit_status("the benchmark of P-EAGLE", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
