"""Measure what the host does in a decode round of the plugin's worker, and count its launches.

    python benchmarks/host_time.py [--engine sglang|vllm] [--repeats 5] [--rounds 60] [--json out/host-time.json]
    python benchmarks/host_time.py --policies auto fixed random    # what choosing shapes adds, in both engines

The engine's scheduler runs in this process, on the CPU, without a server (benchmarks/sglang_rounds.py,
benchmarks/vllm_rounds.py), with eager rounds and with captured ones. Native kernels, the forwards of the models and
replays of captured functions run outside the clock (benchmarks/launches.py): what is left is the host's work. On a GPU
a launch also takes the driver's time; torch's operations on tiny CPU tensors take about as long as their launches
there. A captured round runs after emulated replays, which leave the processor's caches cold: its times are upper
bounds. All batches are interleaved; a time is the median over the repeats of the
median over the rounds, with its quartiles.

With `--policies` only captured rounds are measured, with the shapes that each policy chooses (host_policies.py). Each
engine runs in a process of its own environment; `--engine` asks for one.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.host_engines import documents_of_both, rounds_of
from benchmarks.host_policies import PoliciesReport, measure_policies, policies_report, show_policies
from benchmarks.host_report import AIMS, HostTime, ScenarioReport, cost_of, show
from benchmarks.host_rounds import Round, Run, scenarios_of
from benchmarks.launches import Probe
from eagle_plugin.bench.choices import parse_shape
from eagle_plugin.bench.machine import describe_machine, installed_versions
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.common.command_end import end_of
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import MODES

MOST_TOKENS = 1400  # of a request of a run (benchmarks/host_rounds.py), with its rounds that are not measured
FILES = {"sglang": "host-time.json", "vllm": "host-time-vllm.json"}
POLICIES_FILE = "host-time.json"


def measure(engine: str, shape: Shape, batches: Sequence[tuple[int, float]], repeats: int, rounds: int) -> HostTime:
    """Run all batches eagerly and captured `repeats` times, interleaved, and once more to count."""
    module = rounds_of(engine)
    scenarios = scenarios_of(batches)
    kinds = [(one, captured) for one in scenarios for captured in (False, True)]
    found: dict[tuple[str, bool], list[list[Round]]] = {(one.name, captured): [] for one, captured in kinds}
    runs = [Run(one, captured, rounds, False) for _ in range(repeats) for one, captured in kinds]
    runs += [Run(one, captured, 1, True) for one, captured in kinds]
    probe = Probe()
    with tempfile.TemporaryDirectory() as folder, probe.native_kernels():
        for run, measured in module.Rounds(module.boot(Path(folder), shape), probe).run(runs):
            found[run.scenario.name, run.captured].append(measured)
    reports = {}
    for one in scenarios:
        of = (found[one.name, kind] for kind in (False, True))
        eager, captured = (cost_of(mine[:-1], mine[-1], module.PHASES) for mine in of)
        sampled = one.temperature > 0
        reports[one.name] = ScenarioReport(batch=one.batch, sampled=sampled, eager=eager, captured=captured)
    return HostTime(
        date=datetime.date.today().isoformat(),
        engine=engine,
        shape=str(shape),
        repeats=repeats,
        rounds=rounds,
        scenarios=reports,
        aims=AIMS,
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
