"""The report of benchmarks/host_time.py: host times and launches of rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.host_rounds import SCHEDULER, Round
from benchmarks.launches import ENGINE, GRAPH, OURS, Launch
from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles

AIM_MICROSECONDS = 1000  # of the worker in a greedy round at batch 8
AIM_EAGER_LAUNCHES, AIM_LAUNCHES, AIM_GRAPHS = 30, 12, 4
AIMS = {
    "worker_us": AIM_MICROSECONDS,
    "eager_launches": AIM_EAGER_LAUNCHES,
    "captured_launches": AIM_LAUNCHES,
    "graph_launches": AIM_GRAPHS,
}


class Cost(Strict):
    """What a round takes of the host; launches are per round."""

    worker_us: Quartiles = Field(description="the worker's step")
    scheduler_us: Quartiles = Field(description="the engine's work between two steps")
    phases_us: dict[str, Quartiles] = Field(description="of the worker's step")
    launches: float = Field(description="of the plugin outside of the models' forwards and of graphs")
    graph_launches: float
    launches_by_phase: dict[str, float]
    graph_launches_by_phase: dict[str, float]
    launches_by_name: dict[str, float] = Field(description="of the plugin, graphs too")
    engine_launches: float = Field(description="the engine's own in the worker's step")
    engine_launches_by_phase: dict[str, float]


def cost_of(runs: Sequence[Sequence[Round]], counted: Sequence[Round], phases: Sequence[str]) -> Cost:
    """Of one kind of round: quartiles over the medians of each run, and the launches of rounds that were counted."""
    total: Counter[Launch] = Counter()
    for one in counted:
        total.update(one.launches)
    graphs = {launch: n for launch, n in total.items() if launch.name.startswith(GRAPH)}
    ours, engine = (
        {launch: n for launch, n in total.items() if launch.whose == whose and launch not in graphs}
        for whose in (OURS, ENGINE)
    )
    names: Counter[str] = Counter()
    for launch, number in total.items():
        names[launch.name] += number if launch.whose == OURS else 0

    def of(value: Callable[[Round], float]) -> Quartiles:
        return quartiles([statistics.median(map(value, run)) for run in runs])

    def per_round(number: int) -> float:
        return round(number / len(counted), 3)

    def by_phase(found: dict[Launch, int]) -> dict[str, float]:
        return {phase: per_round(sum(n for one, n in found.items() if one.phase == phase)) for phase in phases}

    return Cost(
        worker_us=of(lambda one: one.worker),
        scheduler_us=of(lambda one: one.microseconds.get(SCHEDULER, 0.0)),
        phases_us={phase: of(lambda one, phase=phase: one.microseconds.get(phase, 0.0)) for phase in phases},
        launches=per_round(sum(ours.values())),
        graph_launches=per_round(sum(graphs.values())),
        launches_by_phase=by_phase(ours),
        graph_launches_by_phase=by_phase(graphs),
        launches_by_name={name: per_round(n) for name, n in names.most_common() if n},
        engine_launches=per_round(sum(engine.values())),
        engine_launches_by_phase=by_phase(engine),
    )


def cost_table(title: str, names: Sequence[str], costs: Sequence[Cost]) -> Table:
    """One column per cost."""
    table = Table("per round", *names, title=title)
    for phase in costs[0].phases_us:
        table.add_row(phase, *(f"{one.phases_us[phase].median:.0f}" for one in costs))
    table.add_row("worker", *(f"{one.worker_us.median:.0f}" for one in costs))
    table.add_row("quartiles", *(f"{one.worker_us.q1:.0f}, {one.worker_us.q3:.0f}" for one in costs))
    table.add_row("engine's scheduler", *(f"{one.scheduler_us.median:.0f}" for one in costs), end_section=True)
    table.add_row("launches", *(f"{one.launches:g}" for one in costs))
    table.add_row("graph launches", *(f"{one.graph_launches:g}" for one in costs))
    table.add_row("engine's launches", *(f"{one.engine_launches:g}" for one in costs), end_section=True)
    return table


class ScenarioReport(Strict):
    """The rounds of one kind of batch."""

    batch: int
    sampled: bool
    eager: Cost
    captured: Cost


class HostTime(Strict):
    """`out/host-time.json`, `out/host-time-vllm.json`."""

    date: str
    engine: str
    shape: str
    repeats: int
    rounds: int
    scenarios: dict[str, ScenarioReport]
    aims: dict[str, float]
    versions: dict[str, str]
    machine: Machine


def show(report: HostTime) -> None:
    """Print one table with two columns per kind of batch, eager and captured, and the aims below it."""
    names = [f"{name}\n{kind}" for name in report.scenarios for kind in ("eager", "captured")]
    costs = [x for one in report.scenarios.values() for x in (one.eager, one.captured)]
    title = f"{report.engine}: host time of a decode round in us, shape {report.shape}"
    Console(width=140).print(cost_table(title, names, costs))
    if (greedy := report.scenarios.get("greedy 8")) is not None:
        eager, captured = greedy.eager, greedy.captured
        print(
            f"Aims for greedy 8: worker {AIM_MICROSECONDS} us, found {eager.worker_us.median:.0f} eager and "
            f"{captured.worker_us.median:.0f} captured; launches {AIM_EAGER_LAUNCHES} eager, found {eager.launches:g}; "
            f"captured {AIM_LAUNCHES} and {AIM_GRAPHS} graphs, found {captured.launches:g} and "
            f"{captured.graph_launches:g}."
        )
