"""Measure what the host does in a decode round of the plugin's worker, and count its launches.

    python benchmarks/host_time.py [--engine sglang|vllm] [--repeats 5] [--rounds 60] [--json out/host-time.json]
    python benchmarks/host_time.py --policies auto fixed random    # what choosing shapes adds, in both engines

The engine's scheduler runs in this process, on the CPU, without a server (benchmarks/sglang_rounds.py,
benchmarks/vllm_rounds.py), with eager rounds and with captured ones. Native kernels, the forwards of the models and
replays of captured functions run outside the clock (benchmarks/launches.py): what is left is the host's work. On a GPU
a launch also takes the driver's time; torch's operations on tiny CPU tensors take about as long as their launches
there. The assumptions are in the output. All batches are interleaved; a time is the median over the repeats of the
median over the rounds, with its quartiles.

With `--policies` only captured rounds are measured, with the shapes that each policy chooses (host_policies.py). Each
engine runs in a process of its own environment; `--engine` asks for one.
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

from pydantic import Field
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.host_engines import documents_of_both, rounds_of
from benchmarks.host_policies import PoliciesReport, measure_policies, policies_report, show_policies
from benchmarks.host_rounds import Run, Scenario
from benchmarks.launches import ENGINE, GRAPH, OURS, Launch, Probe
from benchmarks.roofline import H100, H200, LLAMA_8B, Device, Phase, round_bytes, simulate
from eagle_plugin.bench.choices import parse_shape
from eagle_plugin.bench.machine import Machine, describe_machine, installed_versions
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles
from eagle_plugin.common.command_end import end_of
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import MODES

AIM_MICROSECONDS = 1000  # of the worker in a greedy round at batch 8
AIM_EAGER_LAUNCHES, AIM_LAUNCHES, AIM_GRAPHS, AIM_HIDDEN = 30, 12, 4, 0.95
LAUNCH_MICROSECONDS = 2.5  # of the CUDA driver per kernel or copy
GRAPH_MICROSECONDS = 10.0  # per launch of a captured graph
KERNEL_MICROSECONDS = 2.0  # on the device per small kernel
CONTEXT = 1024  # that is simulated
MOST_TOKENS = 1400  # of a request of a run (benchmarks/host_rounds.py), with its rounds that are not measured
ASSUMPTIONS = (
    f"a kernel launch takes the driver {LAUNCH_MICROSECONDS} us, a graph {GRAPH_MICROSECONDS:g} us",
    f"a small kernel takes the device {KERNEL_MICROSECONDS:g} us, as many of them as an eager round launches",
    "the forwards of the models take bytes / bandwidth of the data sheet",
    f"Llama-3.1-8B in bf16, an EAGLE-3 head of it with 32,000 draft tokens, {CONTEXT} tokens of context per request",
    "the host of the GPU is as fast as this machine",
    "copies of the engine's own buffers to the device are missing where a CPU has one buffer for both",
    "a captured round runs after emulated replays, which leave the processor's caches cold: its times are upper bounds",
)


FILES = {"sglang": "host-time.json", "vllm": "host-time-vllm.json"}
POLICIES_FILE = "host-time.json"


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


def measure(engine: str, shape: Shape, batches: Sequence[tuple[int, float]], repeats: int, rounds: int) -> HostTime:
    """Run all batches eagerly and captured `repeats` times, interleaved, and once more to count."""
    module = rounds_of(engine)
    scenarios = [
        Scenario(f"{'sampled' if temperature else 'greedy'} {batch}", batch, temperature)
        for batch, temperature in batches
    ]
    kinds = [(one, captured) for one in scenarios for captured in (False, True)]
    times: dict[tuple[str, bool], list[dict[str, float]]] = {(one.name, captured): [] for one, captured in kinds}
    counted: dict[tuple[str, bool], dict[Launch, int]] = {}
    runs = [Run(one, captured, rounds, False) for _ in range(repeats) for one, captured in kinds]
    runs += [Run(one, captured, 1, True) for one, captured in kinds]
    probe = Probe()
    with tempfile.TemporaryDirectory() as folder, probe.native_kernels():
        for run, found in module.Rounds(module.boot(Path(folder), shape), probe).run(runs):
            key = (run.scenario.name, run.captured)
            if run.counting:
                counted[key] = found[0].launches
                continue
            rows = [one.microseconds | {"worker": one.worker} for one in found]
            times[key].append({part: statistics.median(row[part] for row in rows) for part in rows[0]})
    reports = {}
    for one in scenarios:
        eager, captured = (
            cost(times[one.name, kind], counted[one.name, kind], module.PHASES) for kind in (False, True)
        )
        reports[one.name] = ScenarioReport(
            batch=one.batch,
            sampled=one.temperature > 0,
            eager=eager,
            captured=captured,
            simulated={
                device.name: [
                    simulate_round(eager, captured, module.PARTS, device, shape, one.batch, on) for on in (False, True)
                ]
                for device in (H100, H200)
            },
        )
    return HostTime(
        date=datetime.date.today().isoformat(),
        engine=engine,
        shape=str(shape),
        repeats=repeats,
        rounds=rounds,
        scenarios=reports,
        aims={
            "worker_us": AIM_MICROSECONDS,
            "eager_launches": AIM_EAGER_LAUNCHES,
            "captured_launches": AIM_LAUNCHES,
            "graph_launches": AIM_GRAPHS,
            "hidden_share": AIM_HIDDEN,
        },
        assumptions=list(ASSUMPTIONS),
        versions=installed_versions(("torch", engine, "apache-tvm-ffi", "eagle-plugin")),
        machine=describe_machine(),
    )


def compare_policies(options: argparse.Namespace, batches: Sequence[tuple[int, float]]) -> int:
    """Measure the policies in one engine, or in both, each in a process of its own environment."""
    file = options.json or Path("out") / POLICIES_FILE
    if options.engine:
        module = rounds_of(options.engine)
        times = measure_policies(
            module, options.engine, options.shape, batches, options.policies, options.repeats, options.rounds
        )
        show_policies(options.engine, times)
        write_json(policies_report({options.engine: times}), file)
        return 0
    engines = {}
    for text in documents_of_both(__file__, sys.argv[1:]):
        engines |= PoliciesReport.model_validate_json(text).engines
    write_json(policies_report(engines), file)
    return 0


def cost(times: list[dict[str, float]], launches: dict[Launch, int], phases: Sequence[str]) -> Cost:
    """The report of one kind of round: medians of each repeat, and the launches of one round."""

    def of(part: str) -> Quartiles:
        return quartiles([row[part] for row in times])

    def by_phase(found: dict[Launch, int]) -> dict[str, int]:
        return {phase: sum(n for launch, n in found.items() if launch.phase == phase) for phase in phases}

    graphs = {launch: n for launch, n in launches.items() if launch.name.startswith(GRAPH)}
    ours = {launch: n for launch, n in launches.items() if launch.whose == OURS and launch not in graphs}
    engine = {launch: n for launch, n in launches.items() if launch.whose == ENGINE and launch not in graphs}
    names: Counter[str] = Counter()
    for launch, number in ours.items():
        names[launch.name] += number
    return Cost(
        worker_us=of("worker"),
        scheduler_us=of("scheduler"),
        phases_us={phase: of(phase) for phase in phases},
        launches=sum(ours.values()),
        graph_launches=sum(graphs.values()),
        launches_by_phase=by_phase(ours),
        graph_launches_by_phase=by_phase(graphs),
        launches_by_name=dict(names.most_common()),
        engine_launches=sum(engine.values()),
        engine_launches_by_phase=by_phase(engine),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(FILES), help="default: sglang, or both with --policies")
    parser.add_argument(
        "--policies", nargs="+", choices=MODES, help="compare these instead of eager and captured rounds"
    )
    parser.add_argument("--shape", type=parse_shape, default=Shape(3, 4, 16), help="steps/topk/draft tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60, help="measured per scenario and repeat")
    parser.add_argument(
        "--greedy", type=int, nargs="*", metavar="BATCH", help="default: 1 8 32, or 1 8 with --policies"
    )
    parser.add_argument("--sampled", type=int, nargs="*", metavar="BATCH", help="default: 8, or none with --policies")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="default: out/host-time.json, out/host-time-vllm.json"
    )
    options = parser.parse_args()
    greedy, sampled = ([1, 8], []) if options.policies else ([1, 8, 32], [8])
    greedy = greedy if options.greedy is None else options.greedy
    sampled = sampled if options.sampled is None else options.sampled
    batches = [(batch, 0.0) for batch in greedy] + [(batch, 0.8) for batch in sampled]
    if not batches or not all(1 <= batch <= 32 for batch, _ in batches):
        parser.error("wanted at least one batch, of 1 to 32 requests")
    most = MOST_TOKENS // options.shape.max_accept_length
    if options.repeats < 1 or not 1 <= options.rounds <= most:
        parser.error(f"wanted at least one repeat, and 1 to {most} rounds of shape {options.shape}")
    if options.policies:
        return compare_policies(options, batches)
    engine = options.engine or "sglang"
    report = measure(engine, options.shape, batches, options.repeats, options.rounds)
    write_json(report, options.json or Path("out") / FILES[engine])
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
