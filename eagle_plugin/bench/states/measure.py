"""Measure all states under each cell's load, interleaved, and keep what is measured in a file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_plugin.bench.load import accept_length
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.serving.closed_loop import Phase
from eagle_plugin.bench.serving.measure import Loaded, Unfinished, run_load
from eagle_plugin.bench.serving.outputs import save
from eagle_plugin.bench.serving.plan import requests_of
from eagle_plugin.bench.serving.prompts import select_asks
from eagle_plugin.bench.states.configs import NAMES, State
from eagle_plugin.bench.states.document import Cell, Measurement
from eagle_plugin.bench.states.request_times import accepted_counts, median_times
from eagle_plugin.bench.steal import StealWatch


@dataclass(frozen=True)
class StatesPlan:
    """The cells, how often each is measured, and how long answers are."""

    cells: tuple[Cell, ...]
    repeats: int
    max_tokens: int  # mean limit of an answer
    temperature: float = 0.0

    def turns(self) -> Iterator[tuple[int, Cell]]:
        """Every (repeat, cell): all cells once, then all again, so that a slow hour is part of every cell."""
        yield from ((repeat, cell) for repeat in range(self.repeats) for cell in self.cells)


class StatesMeasured(Unfinished):
    """The measurements of a run that is not finished."""

    measurements: list[Measurement] = []

    def has(self, repeat: int, cell: Cell, state: State) -> bool:
        """Whether that measurement was made."""
        return any((one.repeat, one.cell, one.state) == (repeat, cell, state) for one in self.measurements)


def measure_states(
    servers: Mapping[State, Server],
    plan: StatesPlan,
    questions: Mapping[str, Sequence[Question]],
    measured: StatesMeasured,
    path: Path,
    steps: Steps,
) -> StealWatch:
    """Add the missing measurements of the plan to `measured`, and write it to `path` after each of them.

    In every repeat of a cell all servers answer the same questions, each in another place of the order than before,
    while the others are paused. The next repeat asks other questions, as far as the set has them. Raises LoadError,
    ServerError, or ValueError if `path` cannot be written.
    """
    states, total = list(servers), len(plan.cells) * plan.repeats * len(servers)
    watch = StealWatch(total, lambda text: steps.log(f"[yellow]{text}[/]"))
    done = 0
    with steps.step("measuring") as step:
        for repeat, cell in plan.turns():
            first = (repeat + plan.cells.index(cell)) % len(states)
            count = requests_of(cell.concurrency)
            asks = select_asks(questions[cell.prompts], repeat * count, count, plan.max_tokens)
            phase = Phase(cell.concurrency, asks)
            for state in states[first:] + states[:first]:
                if not measured.has(repeat, cell, state):
                    step.update(f"repeat {repeat + 1} of {plan.repeats}, {cell}, {NAMES[state]}", done / total)
                    load = partial(run_load, servers[state], [phase], plan.temperature)
                    loaded, steal = watch.least_stolen(load, f"{cell}, {NAMES[state]}")
                    measured.measurements.append(summarise(repeat, cell, state, loaded, steal))
                    save(measured, path)
                done += 1
    return watch


def summarise(repeat: int, cell: Cell, state: State, loaded: Loaded, steal: float | None) -> Measurement:
    """One measurement as the document holds it.

    Throughputs are of the window in which all clients were busy. Times are of the requests that ended within it, or of
    all where none did.
    """
    (window,) = loaded.windows
    times = median_times(window.finished or window.asked)
    length = accept_length(window.asked)
    mean_tokens = statistics.fmean(answer.completion_tokens for answer in window.asked)
    return Measurement(
        repeat=repeat,
        concurrency=cell.concurrency,
        prompts=cell.prompts,
        state=state,
        seconds=round(window.seconds, 3),
        requests=len(window.asked),
        tokens=window.tokens,
        tokens_per_s=round(window.tokens_per_s, 3),
        requests_per_s=round(window.tokens_per_s / mean_tokens, 4),
        ttft_ms=round(times.ttft_ms, 2),
        tpot_ms=_rounded(times.tpot_ms),
        itl_ms=_rounded(times.itl_ms),
        otps=_rounded(times.otps),
        accept_length=_rounded(length),
        accepted=accepted_counts(window.asked),
        steal=_rounded(steal, 4),
        others=round(loaded.others, 3),
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
