"""Measure what the host does in a decode round of the SGLang worker, and count its launches.

    python benchmarks/host_time.py [--repeats 5] [--rounds 60] [--json out/host-time.json]

SGLang's scheduler runs in this process, on the CPU, without a server. The forwards of the target and of the head
return fixed tensors, and native kernels run outside the clock (benchmarks/launches.py): what is left is the host's
work. On a GPU a launch also takes the driver's time, and torch's operations on tiny CPU tensors take about as long as
their launches there; both are in the assumptions that the output states. The scenarios are interleaved; a time is the
median over the repeats of the median over the rounds, with its quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launches import ENGINE, GRAPH, OURS, Launch, Probe
from benchmarks.roofline import H100, H200, LLAMA_8B, Device, Phase, round_bytes, simulate
from eagle_plugin.bench.choices import parse_shape
from eagle_plugin.bench.machine import Machine, describe_machine, installed_versions
from eagle_plugin.bench.measure import spread
from eagle_plugin.bench.report import Quartiles, quartiles, write_json
from eagle_plugin.command_end import end_of
from eagle_plugin.core.shape import Shape

AIM_MICROSECONDS = 1000  # of a greedy round at batch 8, outside of the engine's scheduler
AIM_LAUNCHES, AIM_HIDDEN = 30, 0.95
LAUNCH_MICROSECONDS = 2.5  # of the CUDA driver per kernel
GRAPH_MICROSECONDS = 10.0  # per launch of a captured graph: one per forward of a model here
KERNEL_MICROSECONDS = 2.0  # on the device per small kernel
CONTEXT = 1024
ASSUMPTIONS = (
    f"a kernel launch takes the driver {LAUNCH_MICROSECONDS} us, a graph {GRAPH_MICROSECONDS:g} us",
    "the forward of a model is one graph launch; the engine's runner around the target is in the host's time",
    f"a small kernel takes the device {KERNEL_MICROSECONDS:g} us; the models' forwards take bytes / bandwidth",
    f"Llama-3.1-8B in bf16, an EAGLE-3 head of it with 32,000 draft tokens, {CONTEXT} tokens of context per request",
    "a GPU machine's core is as fast as this one",
)


class Strict(BaseModel):
    """A part of the document; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class SimulatedRound(Strict):
    """A round of Llama-3.1-8B on one GPU by bytes over bandwidth, with the host's time measured here."""

    overlap: bool
    round_us: float
    device_us: float
    host_us: float
    hidden_share: float = Field(description="of the host's time during which the device computes")


class ScenarioReport(Strict):
    """The rounds of one kind of batch."""

    batch: int
    sampled: bool
    worker_us: Quartiles = Field(description="the worker's step, the target's runner of the engine left out")
    target_runner_us: Quartiles
    scheduler_us: Quartiles = Field(description="the engine's work between two rounds")
    phases_us: dict[str, Quartiles]
    launches: int = Field(description="of the plugin outside of the models' forwards, per round")
    graph_launches: int
    launches_by_phase: dict[str, int]
    launches_by_name: dict[str, int]
    engine_launches: int = Field(description="the engine's own copies in the worker's step")
    simulated: dict[str, list[SimulatedRound]]


class HostTime(Strict):
    """`out/host-time.json`."""

    date: str
    shape: str
    repeats: int
    rounds: int
    scenarios: dict[str, ScenarioReport]
    aims: dict[str, float]
    assumptions: list[str]
    versions: dict[str, str]
    machine: Machine


def simulated(report: ScenarioReport, device: Device, shape: Shape) -> list[SimulatedRound]:
    """The time line of this kind of batch on a GPU, without and with overlap scheduling."""
    phases = {name: value.median for name, value in report.phases_us.items()}
    launches = report.launches_by_phase
    data = round_bytes(LLAMA_8B, shape, report.batch, CONTEXT)
    levels = max(shape.steps - 1, 0)
    target = phases["target's runner"] + LAUNCH_MICROSECONDS * report.engine_launches

    def phase(names: Sequence[str], host: float, graphs: int, read: float) -> Phase:
        count = sum(launches.get(name, 0) for name in names)
        host += sum(phases.get(name, 0.0) for name in names) + LAUNCH_MICROSECONDS * count + GRAPH_MICROSECONDS * graphs
        return Phase(host, 1e6 * read / device.bandwidth + KERNEL_MICROSECONDS * count)

    parts = (
        phase(("begin", "draft"), 0.0, levels, data.draft),
        phase(("verify preparation",), target, 1, data.verify),
        phase(("tail", "extend", "rest"), 0.0, 1, data.tail + data.extend),
    )
    lines = {overlap: simulate(parts, report.scheduler_us.median, overlap) for overlap in (False, True)}
    return [
        SimulatedRound(
            overlap=overlap,
            round_us=round(line.period, 1),
            device_us=round(line.device, 1),
            host_us=round(line.host, 1),
            hidden_share=round(line.hidden, 4),
        )
        for overlap, line in lines.items()
    ]


def measure(shape: Shape, batches: Sequence[tuple[int, float]], repeats: int, rounds: int) -> HostTime:
    """Run all scenarios `repeats` times, interleaved, and once more to count."""
    from benchmarks import sglang_rounds as sglang

    scenarios = [
        sglang.Scenario(f"{'sampled' if temperature else 'greedy'} {batch}", batch, temperature)
        for batch, temperature in batches
    ]
    times: dict[str, list[dict[str, float]]] = {one.name: [] for one in scenarios}  # medians of each repeat
    counted: dict[str, dict[Launch, int]] = {}
    runs = [sglang.Run(one, rounds, False) for _ in range(repeats) for one in scenarios]
    runs += [sglang.Run(one, 1, True) for one in scenarios]
    probe = Probe()
    with tempfile.TemporaryDirectory() as folder, probe.native_kernels():
        for run, found in sglang.Rounds(sglang.boot(Path(folder), shape), probe).run(runs):
            if run.counting:
                counted[run.scenario.name] = found[0].launches
                continue
            parts = [*sglang.PHASES, sglang.SCHEDULER, "worker"]
            rows = [one.microseconds for one in found]
            for row in rows:
                row["worker"] = sum(row.get(name, 0.0) for name in sglang.PHASES if name != sglang.TARGET)
            times[run.scenario.name].append(
                {part: statistics.median(row.get(part, 0.0) for row in rows) for part in parts}
            )
    reports = {
        one.name: _report(one.batch, one.temperature > 0, times[one.name], counted[one.name], sglang.PHASES)
        for one in scenarios
    }
    for report in reports.values():
        report.simulated = {device.name: simulated(report, device, shape) for device in (H100, H200)}
    return HostTime(
        date=datetime.date.today().isoformat(),
        shape=str(shape),
        repeats=repeats,
        rounds=rounds,
        scenarios=reports,
        aims={"worker_us": AIM_MICROSECONDS, "launches": AIM_LAUNCHES, "hidden_share": AIM_HIDDEN},
        assumptions=list(ASSUMPTIONS),
        versions=installed_versions(("torch", "sglang", "apache-tvm-ffi", "eagle-plugin")),
        machine=describe_machine(),
    )


def _report(
    batch: int, sampled: bool, times: list[dict[str, float]], launches: dict[Launch, int], phases: Sequence[str]
) -> ScenarioReport:
    def of(part: str) -> Quartiles:
        return quartiles(spread([row[part] for row in times]))

    def count(whose: str, graphs: bool = False) -> Counter[Launch]:
        return Counter({x: n for x, n in launches.items() if x.whose == whose and x.name.startswith(GRAPH) == graphs})

    ours = count(OURS)
    by_name: Counter[str] = Counter()
    for launch, number in ours.items():
        by_name[launch.name] += number
    return ScenarioReport(
        batch=batch,
        sampled=sampled,
        worker_us=of("worker"),
        target_runner_us=of("target's runner"),
        scheduler_us=of("scheduler"),
        phases_us={phase: of(phase) for phase in phases},
        launches=ours.total(),
        graph_launches=count(OURS, graphs=True).total(),
        launches_by_phase={phase: sum(n for x, n in ours.items() if x.phase == phase) for phase in phases},
        launches_by_name=dict(by_name.most_common()),
        engine_launches=count(ENGINE).total(),
        simulated={},
    )


def show(report: HostTime) -> None:
    """Print one table with a column per scenario."""
    columns = list(report.scenarios.values())
    shown = Table("per round", *report.scenarios, title=f"host time of a decode round, shape {report.shape}")
    for phase in columns[0].phases_us:
        shown.add_row(f"{phase}, us", *(f"{one.phases_us[phase].median:.0f}" for one in columns))

    def spread_of(value: Quartiles) -> str:
        return f"{value.median:.0f} ({value.q1:.0f} to {value.q3:.0f})"

    shown.add_row("worker without the target's runner, us", *(spread_of(one.worker_us) for one in columns))
    shown.add_row("engine's scheduler, us", *(spread_of(one.scheduler_us) for one in columns), end_section=True)
    shown.add_row("launches of the plugin", *(str(one.launches) for one in columns))
    shown.add_row("graph launches", *(str(one.graph_launches) for one in columns))
    shown.add_row("launches of the engine", *(str(one.engine_launches) for one in columns), end_section=True)
    for device in columns[0].simulated:
        for line in columns[0].simulated[device]:
            lines = [next(x for x in one.simulated[device] if x.overlap == line.overlap) for one in columns]
            name = f"{device}, {'overlap' if line.overlap else 'no overlap'}: round us (host hidden)"
            shown.add_row(name, *(f"{x.round_us:.0f} ({100 * x.hidden_share:.0f} %)" for x in lines))
    console = Console(width=140)
    console.print(shown)
    console.print("Simulated: " + "; ".join(report.assumptions) + ".")
    greedy = report.scenarios.get("greedy 8")
    if greedy is not None:
        console.print(
            f"Aim for greedy 8: at most {AIM_MICROSECONDS} us, found {greedy.worker_us.median:.0f}; at most "
            f"{AIM_LAUNCHES} launches, found {greedy.launches}."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=parse_shape, default=Shape(3, 4, 16), help="steps/topk/draft tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60, help="measured per scenario and repeat")
    parser.add_argument("--greedy", type=int, nargs="*", default=[1, 8, 32], metavar="BATCH")
    parser.add_argument("--sampled", type=int, nargs="*", default=[8], metavar="BATCH")
    parser.add_argument("--json", type=Path, default=Path("out/host-time.json"), metavar="FILE")
    options = parser.parse_args()
    batches = [(batch, 0.0) for batch in options.greedy] + [(batch, 0.8) for batch in options.sampled]
    if not batches or not all(1 <= batch <= 32 for batch, _ in batches) or min(options.repeats, options.rounds) < 1:
        parser.error("wanted batches of 1 to 32, and at least one repeat and one round")
    report = measure(options.shape, batches, options.repeats, options.rounds)
    write_json(report, options.json)
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
