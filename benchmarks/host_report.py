"""The report of benchmarks/host_time.py: host times and launches of rounds."""

from __future__ import annotations

from pydantic import Field
from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.quartiles import Quartiles, Strict

AIM_MICROSECONDS = 1000  # of the worker in a greedy round at batch 8
AIM_EAGER_LAUNCHES, AIM_LAUNCHES, AIM_GRAPHS = 30, 12, 4
AIMS = {
    "worker_us": AIM_MICROSECONDS,
    "eager_launches": AIM_EAGER_LAUNCHES,
    "captured_launches": AIM_LAUNCHES,
    "graph_launches": AIM_GRAPHS,
}


class Cost(Strict):
    """What a round takes of the host."""

    worker_us: Quartiles = Field(description="the worker's step")
    scheduler_us: Quartiles = Field(description="the engine's work between two steps")
    phases_us: dict[str, Quartiles] = Field(description="of the worker's step")
    launches: int = Field(description="of the plugin outside of the models' forwards and of graphs")
    graph_launches: int
    launches_by_phase: dict[str, int]
    graph_launches_by_phase: dict[str, int]
    launches_by_name: dict[str, int]
    engine_launches: int = Field(description="the engine's own in the worker's step")
    engine_launches_by_phase: dict[str, int]


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
    shown = Table(
        "per round", *names, title=f"{report.engine}: host time of a decode round in us, shape {report.shape}"
    )
    for phase in costs[0].phases_us:
        shown.add_row(phase, *(f"{one.phases_us[phase].median:.0f}" for one in costs))
    shown.add_row("worker", *(f"{one.worker_us.median:.0f}" for one in costs))
    shown.add_row("quartiles", *(f"{one.worker_us.q1:.0f}, {one.worker_us.q3:.0f}" for one in costs))
    shown.add_row("engine's scheduler", *(f"{one.scheduler_us.median:.0f}" for one in costs), end_section=True)
    shown.add_row("launches", *(str(one.launches) for one in costs))
    shown.add_row("graph launches", *(str(one.graph_launches) for one in costs))
    shown.add_row("engine's launches", *(str(one.engine_launches) for one in costs), end_section=True)
    Console(width=140).print(shown)
    if (greedy := report.scenarios.get("greedy 8")) is not None:
        eager, captured = greedy.eager, greedy.captured
        print(
            f"Aims for greedy 8: worker {AIM_MICROSECONDS} us, found {eager.worker_us.median:.0f} eager and "
            f"{captured.worker_us.median:.0f} captured; launches {AIM_EAGER_LAUNCHES} eager, found {eager.launches}; "
            f"captured {AIM_LAUNCHES} and {AIM_GRAPHS} graphs, found {captured.launches} and {captured.graph_launches}."
        )
