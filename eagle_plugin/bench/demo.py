"""`eagle-plugin demo`: plain decoding, the engine's own speculation and the plugin on the same questions."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from eagle_plugin.bench.animation import draw_answers
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
from eagle_plugin.bench.equality import QUANTISED, UNFINISHED, Comparison, compare_if_served
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import draw, facts_of, report_path, save
from eagle_plugin.bench.picture import draw_demo
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question, assign_rounds, read_questions
from eagle_plugin.bench.report import (
    DemoReport,
    DemoSettings,
    Equality,
    SpreadDetail,
    plain_stats,
    speculative_stats,
)
from eagle_plugin.bench.spec import CONTEXT, Mode, ServerSpec
from eagle_plugin.bench.speed import SpeedResult, measure_speed
from eagle_plugin.bench.table import demo_table, print_bars, repeats_sentence, speed_sentence, verdict_sentence
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.devices import usable_cores
from eagle_plugin.core.shape import Shape
from eagle_plugin.models.shipped import question_files

EQUALITY_QUESTIONS = 8  # compared in fp32 unless --thorough, spread over all groups
EQUALITY_TOKENS = 64
MEASURED_TOKENS, THOROUGH_TOKENS = 64, 128
QUICK_REPEATS, QUICK_TOKENS, QUICK_QUESTIONS = 2, 32, 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The demo's options."""
    parser = Parser(prog="eagle-plugin demo", description=__doc__, epilog=ENGINE_FLAGS)
    add_model_options(parser)
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON-lines files (default: our questions)")
    parser.add_argument("--steps", type=int, help="plugin: depth of the draft tree")
    parser.add_argument("--topk", type=int, help="plugin: children per node")
    parser.add_argument("--draft-tokens", type=int, help="plugin: nodes that the target verifies, the root included")
    parser.add_argument("--builtin", type=parse_shape, metavar="S/K/N", help="the engine's own steps/topk/tokens")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help=f"tokens per measured answer (default: {MEASURED_TOKENS}, with --thorough {THOROUGH_TOKENS})",
    )
    parser.add_argument("--threads", type=int, help="OpenMP threads of every server")
    parser.add_argument("--passes", type=int, default=1, help="how often the question set is asked (default: 1)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--thorough",
        action="store_true",
        help="for publishing: make every repeat and compare every question in fp32, instead of stopping when the "
        "quartiles of the ratio are less than 5 %% of its median apart",
    )
    length.add_argument("--quick", action="store_true", help="few questions and short answers: a trial, not a result")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of report, picture and logs/ (default: out)"
    )
    options = parse_with_engine_flags(parser, argv)
    engine = ENGINES[options.engine]
    if options.threads is None:
        options.threads = engine.default_threads(usable_cores())
    if options.max_tokens is None:
        options.max_tokens = THOROUGH_TOKENS if options.thorough else MEASURED_TOKENS
    for name in ("max_tokens", "threads", "passes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, wanted at least 1")
    return options


def server_specs(options: argparse.Namespace, target: Path, head: Path) -> dict[Mode, ServerSpec]:
    """The three servers that the demo compares, for one request at a time."""
    device = chosen_device(options.device)
    plain = ServerSpec(
        target=target,
        mode="plain",
        engine=options.engine,
        device=device,
        threads=options.threads,
        max_running_requests=1,
        max_total_tokens=2 * CONTEXT,  # vLLM starts only with more than one request of the context
        extra_flags=options.engine_flags,
    )
    engine = ENGINES[options.engine]
    best = engine.plugin_shape(head, device, target)
    given = (options.steps, options.topk, options.draft_tokens)
    shape = Shape(*(wanted if number is None else number for number, wanted in zip(given, best, strict=True)))
    return {
        "plain": plain,
        "builtin": replace(plain, mode="builtin", head=head, shape=options.builtin or engine.own_shape(device, target)),
        "plugin": replace(plain, mode="plugin", head=head, shape=shape),
    }


def run(options: argparse.Namespace, steps: Steps) -> DemoReport:
    """Prepare the target, measure, compare, and return the report. Raises ServerError, LoadError or ValueError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    specs = server_specs(options, target, resolve_head(options.head, target, options.engine))
    questions = read_questions(options.prompts or question_files())
    repeats, compared, tokens = assign_rounds(questions) * options.passes, len(questions), EQUALITY_TOKENS
    if options.quick:
        repeats, compared, tokens = repeats[:QUICK_REPEATS], QUICK_QUESTIONS, QUICK_TOKENS
        options.max_tokens = min(options.max_tokens, QUICK_TOKENS)
    elif not options.thorough:
        compared = EQUALITY_QUESTIONS
    logs = options.out / "logs"
    speed = measure_speed(specs, repeats, options.max_tokens, options.thorough, logs, steps)
    made = len(speed.series["plain"].repeats)
    steps.log(repeats_sentence(made, len(repeats), speed.stop_reason))
    names: dict[Mode, str] = {"plain": "plain decoding", "builtin": "engine's own", "plugin": "eagle-plugin"}
    print_bars(speed.series, names, steps.console)
    questions = questions[:: max(1, len(questions) // compared)][:compared]
    report = partial(build_report, options, specs, speed, len(repeats), questions, tokens)
    # Now: the servers of the comparison may need more memory than there is, and a user may not wait for them.
    show(report(Comparison([], [], UNFINISHED)), report_path(options.out, "demo", options.engine), steps)
    return report(compare_if_served(specs, questions, tokens, logs, steps))


def show(report: DemoReport, path: Path, steps: Steps) -> None:
    """Print the table, write the report to `path`, and draw the picture and the answers (SVG) beside it."""
    steps.console.print(demo_table(report))
    steps.log(speed_sentence(report))
    save(report, path)
    draw(report, draw_demo, path, steps)
    if report.shown:
        with contextlib.suppress(OSError):  # such as a full disk, which is told of the picture
            draw_answers(report, path.with_suffix(".svg"))
            steps.log(f"the first answers as they arrived, for a browser: {path.with_suffix('.svg')}")


def build_report(
    options: argparse.Namespace,
    specs: dict[Mode, ServerSpec],
    speed: SpeedResult,
    max_repeats: int,
    compared: Sequence[Question],
    equality_tokens: int,
    comparison: Comparison,
) -> DemoReport:
    """The document of what was measured; texts are called equal only if there was a text to compare."""
    series = speed.series
    rates = {mode: one.tokens_per_s for mode, one in series.items()}
    over_plain = ratio_quartiles(rates["plugin"], rates["plain"])
    over_builtin = ratio_quartiles(rates["plugin"], rates["builtin"])
    same = {
        mode: sum(a == b for a, b in zip(series["plain"].responses, series[mode].responses, strict=True))
        for mode in ("builtin", "plugin")
    }
    plugin = specs["plugin"]
    assert plugin.head is not None
    different, empty, not_compared = comparison
    told = 0 if not_compared else len(compared) - len(empty)
    return DemoReport(
        **facts_of(options.engine),
        engine_version=speed.engine_version,
        target=plugin.target.name,
        head=plugin.head.name,
        prompts=len(compared),
        greedy_equal=told > 0 and not different,
        plain=plain_stats(series["plain"]),
        builtin=speculative_stats(series["builtin"], "builtin"),
        plugin=speculative_stats(series["plugin"], "plugin"),
        speedup_vs_plain=round(over_plain.median, 3),
        speedup_vs_builtin=round(over_builtin.median, 3),
        equality=Equality(
            max_tokens=equality_tokens,
            equal=told - len(different),
            compared=told,
            different=different,
            empty=empty,
            not_compared=not_compared,
            bf16_builtin_equal=same["builtin"],
            bf16_plugin_equal=same["plugin"],
            bf16_compared=len(series["plain"].responses),
        ),
        spread=SpreadDetail(
            plain_tokens_per_s=quartiles(rates["plain"]),
            builtin_tokens_per_s=quartiles(rates["builtin"]),
            plugin_tokens_per_s=quartiles(rates["plugin"]),
            builtin_speedup_vs_plain=ratio_quartiles(rates["builtin"], rates["plain"]),
            speedup_vs_plain=over_plain,
            speedup_vs_builtin=over_builtin,
        ),
        settings=DemoSettings(
            max_tokens=options.max_tokens,
            repeats=len(series["plain"].repeats),
            max_repeats=max_repeats,
            stop_reason=speed.stop_reason,
            prompts_measured=len(series["plain"].responses),
            device=specs["plain"].device,
            threads=options.threads,
            algorithm=plugin.speculation,
            plugin_shape=str(plugin.shape),
            builtin_shape=str(specs["builtin"].shape),
            plugin_worker=speed.plugin_line,
            quick=options.quick,
            thorough=options.thorough,
            busy_percent=speed.busy_percent,
            over_steal_limit=speed.over_steal_limit,
        ),
        shown=speed.shown,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the greedy texts were equal, or were not compared because the target is quantised.

    1 otherwise or after a failure, 2 after one before the first server; its message is printed.
    """
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        report = run(options, steps)
        save(report, report_path(options.out, "demo", options.engine))
        steps.log(verdict_sentence(report))
        if report.equality.empty:
            steps.console.print(
                "[bold]answers without any token in fp32, which prove nothing:[/] "
                + escape(", ".join(report.equality.empty))
            )
        if report.equality.different:
            steps.console.print(f"[bold red]texts differ in fp32:[/] {', '.join(report.equality.different)}")
        return 0 if report.greedy_equal or report.equality.not_compared == QUANTISED else 1

    return exit_status("demo", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
