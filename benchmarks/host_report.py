"""The report of benchmarks/host_time.py: host times and launches of rounds, and what follows for rounds of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.roofline import H100, H200, LLAMA_8B, Device, Phase, round_bytes, simulate
from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.quartiles import Quartiles, Strict
from eagle_plugin.core.shape import Shape

AIM_MICROSECONDS = 1000  # of the worker in a greedy round at batch 8
AIM_EAGER_LAUNCHES, AIM_LAUNCHES, AIM_GRAPHS, AIM_HIDDEN = 30, 12, 4, 0.95
AIMS = {
    "worker_us": AIM_MICROSECONDS,
    "eager_launches": AIM_EAGER_LAUNCHES,
    "captured_launches": AIM_LAUNCHES,
    "graph_launches": AIM_GRAPHS,
    "hidden_share": AIM_HIDDEN,
}
LAUNCH_MICROSECONDS = 2.5  # of the CUDA driver per kernel or copy
GRAPH_MICROSECONDS = 10.0  # per launch of a captured graph
KERNEL_MICROSECONDS = 2.0  # on the device per small kernel
CONTEXT = 1024  # that is simulated
ASSUMPTIONS = (
    f"a kernel launch takes the driver {LAUNCH_MICROSECONDS} us, a graph {GRAPH_MICROSECONDS:g} us",
    f"a small kernel takes the device {KERNEL_MICROSECONDS:g} us, as many of them as an eager round launches",
    "the forwards of the models take bytes / bandwidth of the data sheet",
    f"Llama-3.1-8B in bf16, an EAGLE-3 head of it with 32,000 draft tokens, {CONTEXT} tokens of context per request",
    "the host of the GPU is as fast as this machine",
    "copies of the engine's own buffers to the device are missing where a CPU has one buffer for both",
    "a captured round runs after emulated replays, which leave the processor's caches cold: its times are upper bounds",
)


class SimulatedRound(Strict):
    """A captured round of Llama-3.1-8B on one GPU by bytes over bandwidth, with the host's time measured here."""

    overlap: bool
    round_us: float
    device_us: float
    host_us: float
    hidden_share: float = Field(description="of the host's time during which the device computes")


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
    simulated: dict[str, list[SimulatedRound]]


class HostTime(Strict):
    """`out/host-time.json`, `out/host-time-vllm.json`."""

    date: str
    engine: str
    shape: str
    repeats: int
    rounds: int
    scenarios: dict[str, ScenarioReport]
    aims: dict[str, float]
    assumptions: list[str]
    versions: dict[str, str]
    machine: Machine


def simulate_round(
    eager: Cost,
    captured: Cost,
    parts: Sequence[tuple[Sequence[str], str]],
    device: Device,
    shape: Shape,
    batch: int,
    overlap: bool,
) -> SimulatedRound:
    """The time line of captured rounds on a GPU; parts: phases of the host, and the field of `Bytes` that is read."""
    data = round_bytes(LLAMA_8B, shape, batch, CONTEXT)

    def phase(names: Sequence[str], read: float) -> Phase:
        host = sum(captured.phases_us[name].median for name in names)
        launches = (captured.launches_by_phase[name] + captured.engine_launches_by_phase[name] for name in names)
        host += LAUNCH_MICROSECONDS * sum(launches)
        host += GRAPH_MICROSECONDS * sum(captured.graph_launches_by_phase[name] for name in names)
        kernels = sum(eager.launches_by_phase[name] for name in names)
        return Phase(host, 1e6 * read / device.bandwidth + KERNEL_MICROSECONDS * kernels)

    phases = [phase(names, getattr(data, field)) for names, field in parts]
    line = simulate(phases, captured.scheduler_us.median, overlap)
    return SimulatedRound(
        overlap=overlap,
        round_us=round(line.period, 1),
        device_us=round(line.device, 1),
        host_us=round(line.host, 1),
        hidden_share=round(line.hidden, 4),
    )


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
    for name in (H100.name, H200.name):
        for place, title in enumerate(("no overlap", "overlap")):
            lines = [one.simulated[name][place] for one in report.scenarios.values()]
            cells = (cell for x in lines for cell in ("", f"{x.round_us:.0f} ({100 * x.hidden_share:.0f} %)"))
            shown.add_row(f"{name}, {title}: round (host hidden)", *cells)
    console = Console(width=140)
    console.print(shown)
    console.print("Simulated: " + "; ".join(report.assumptions) + ".")
    if (greedy := report.scenarios.get("greedy 8")) is not None:
        eager, captured = greedy.eager, greedy.captured
        hidden = min(lines[1].hidden_share for lines in greedy.simulated.values())
        console.print(
            f"Aims for greedy 8: worker {AIM_MICROSECONDS} us, found {eager.worker_us.median:.0f} eager and "
            f"{captured.worker_us.median:.0f} captured; launches {AIM_EAGER_LAUNCHES} eager, found {eager.launches}; "
            f"captured {AIM_LAUNCHES} and {AIM_GRAPHS} graphs, found {captured.launches} and "
            f"{captured.graph_launches}; hidden by overlap {100 * AIM_HIDDEN:.0f} %, found {100 * hidden:.1f} %."
        )
