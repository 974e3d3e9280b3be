"""Measures the trace: load that rises and falls while the kind of prompts changes, without a pause in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import Field

from eagle_plugin.bench.cells import requests_of
from eagle_plugin.bench.closed_loop import Phase, Window
from eagle_plugin.bench.load import accept_length
from eagle_plugin.bench.measurement import rounded
from eagle_plugin.bench.outputs import Report, StealCount
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.prompt_kinds import PromptKind, select_asks
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.serving.configs import with_policy
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.turns import Turn, run_load, take_turns, watch_steal
from eagle_plugin.core.shape import Shape


class TraceStep(NamedTuple):
    """One phase of the trace, before its questions are chosen."""

    clients: int
    prompts: PromptKind


STEPS = (
    TraceStep(1, "code"),
    TraceStep(4, "code"),
    TraceStep(16, "code"),
    TraceStep(32, "chat"),
    TraceStep(16, "chat"),
    TraceStep(4, "chat"),
    TraceStep(1, "code"),
)
QUICK_STEPS = (TraceStep(1, "code"), TraceStep(8, "chat"), TraceStep(1, "code"))
ANSWER_TOKENS = 48  # mean limit of an answer


class TracePhase(Strict):
    """One server in one phase: medians over the repeats."""

    clients: int
    prompts: PromptKind
    tokens_per_s: Quartiles
    cpu_seconds_per_token: float
    accept_length: float | None


class TraceServer(Strict):
    """One server over the whole trace."""

    shape: str | None = Field(description="steps/topk/draft tokens that the server was started with")
    tokens_per_s: Quartiles = Field(description="all tokens of the trace / all its seconds")
    ratio_vs_plain: Quartiles | None
    cpu_seconds_per_token: float
    accept_length: float | None
    phases: list[TracePhase]


class TraceReport(Report):
    """`out/trace.json`."""

    target: str
    head: str
    repeats: int
    servers: dict[str, TraceServer]
    best_fixed: str | None = Field(description="the fixed shape with the most tokens per second over the trace")
    ratio_vs_best_fixed: Quartiles | None = Field(description="tokens per second, plugin / best_fixed")
    steal: StealCount
    others: float = Field(description="the most that other processes used of the machine during one run of the trace")
    threads: int


def trace_specs(plain: ServerSpec, plugin_shape: Shape, shapes: Sequence[Shape]) -> dict[str, ServerSpec]:
    """The servers of a trace: plain, the plugin with each fixed shape, and the plugin with its policy."""
    plugin = replace(plain, mode="plugin", shape=plugin_shape)
    fixed = {
        f"fixed {shape}": with_policy(replace(plugin, shape=shape), "fixed", f"fixed-{str(shape).replace('/', '-')}")
        for shape in dict.fromkeys((plugin_shape, *shapes))
    }
    return {"plain": plain, **fixed, "plugin": with_policy(plugin, "auto")}


def trace_phases(
    trace: Sequence[TraceStep], questions: Mapping[PromptKind, Sequence[Question]], repeat: int, answer_tokens: int
) -> list[Phase]:
    """The phases with their questions, which differ from repeat to repeat and are the same for all servers."""
    return [
        Phase(
            step.clients,
            select_asks(
                questions[step.prompts],
                (repeat + place) * requests_of(step.clients),
                requests_of(step.clients),
                answer_tokens,
            ),
        )
        for place, step in enumerate(trace)
    ]


def measure_trace(
    servers: Mapping[str, Server], repeats: Sequence[Sequence[Phase]], steps: Steps
) -> tuple[dict[str, list[list[Window]]], float, StealWatch]:
    """The windows of every server and repeat, and the most that other processes used of the machine.

    In each repeat every server runs the whole trace, in another order.
    """
    turns = [Turn(i, 0, phases, f"repeat {i + 1} of {len(repeats)}") for i, phases in enumerate(repeats)]
    watch = watch_steal(len(turns) * len(servers), steps)
    windows: dict[str, list[list[Window]]] = {name: [] for name in servers}
    others = 0.0
    with steps.step("measuring") as step:
        for taken in take_turns(servers, turns, lambda server, load: run_load(server, load, 0.0), watch, step.update):
            windows[taken.name].append(taken.value.windows)
            others = max(others, taken.value.others)
    return windows, others, watch


def total_rates(repeats: Sequence[Sequence[Window]]) -> list[float]:
    """Tokens per second over the whole trace, per repeat."""
    return [sum(w.tokens for w in windows) / sum(w.seconds for w in windows) for windows in repeats]


def describe_server(
    trace: Sequence[TraceStep],
    repeats: Sequence[Sequence[Window]],
    plain: Sequence[Sequence[Window]],
    shape: str | None,
) -> TraceServer:
    """The part of the report about one server; `plain` are the windows of plain decoding, for the ratio."""
    every = [window for windows in repeats for window in windows]
    rates = total_rates(repeats)
    return TraceServer(
        shape=shape,
        tokens_per_s=quartiles(rates),
        ratio_vs_plain=None if repeats is plain else ratio_quartiles(rates, total_rates(plain)),
        cpu_seconds_per_token=_cost(every),
        accept_length=_length(every),
        phases=[
            TracePhase(
                clients=step.clients,
                prompts=step.prompts,
                tokens_per_s=quartiles([windows[place].tokens_per_s for windows in repeats]),
                cpu_seconds_per_token=_cost([windows[place] for windows in repeats]),
                accept_length=_length([windows[place] for windows in repeats]),
            )
            for place, step in enumerate(trace)
        ],
    )


def _cost(windows: Sequence[Window]) -> float:
    used = sum(window.end.cpu_seconds - window.begin.cpu_seconds for window in windows)
    return round(used / sum(window.tokens for window in windows), 5)


def _length(windows: Sequence[Window]) -> float | None:
    return rounded(accept_length(completion for window in windows for completion in window.asked))


def best_fixed(windows: Mapping[str, Sequence[Sequence[Window]]]) -> tuple[str | None, Quartiles | None]:
    """The fixed shape with the most tokens per second over the trace, and the ratio plugin / that, per repeat."""
    rates = {name: total_rates(repeats) for name, repeats in windows.items()}
    names = [name for name in rates if name.startswith("fixed")]
    best = max(names, key=lambda name: quartiles(rates[name]).median, default=None)
    if best is None or "plugin" not in rates:
        return best, None
    return best, ratio_quartiles(rates["plugin"], rates[best])
