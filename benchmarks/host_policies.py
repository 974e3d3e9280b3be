"""What choosing shapes adds to the host's part of a round: benchmarks/host_time.py --policies auto fixed random.

Outcome rounds of one engine of this process; the chooser changes from run to run, so that the runs of all policies are
interleaved. What `auto` learns is made up, so that it chooses as on a GPU where trees of the caps are best: rounds take
what a table says, and two drafted tokens of each request are accepted. All that the policy does on the host is real:
choices, reviews, rounds that compare or probe, path sums and what is learned of them.
Times are processor time of the thread, so that other processes of the machine lengthen them by little: nothing waits.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from benchmarks.host_report import Cost, cost_of, cost_table
from benchmarks.host_rounds import MAX_BATCH, Round, Run, scenarios_of
from benchmarks.launches import Probe
from eagle_plugin.bench.machine import Machine, describe_machine, installed_versions
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles
from eagle_plugin.bench.steal import read_ticks, steal_share
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser, buffers_of
from eagle_plugin.policy.costs import CostModel, Costs, Curve, Forward
from eagle_plugin.policy.policy import REVIEW_ROUNDS, Policy
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.policy.shapes import shapes_within

AIM_RATIO = 1.03  # of the host's time of a round with a policy to that with fixed shapes
BLOCK = REVIEW_ROUNDS  # rounds whose mean counts: the policy does most of its work in one of them
KEPT = 2  # accepted tokens of a drafted round, made up
COSTS = Costs(  # seconds, made up: a target that takes as long for a tree as for one row
    target=Forward(Curve((1, 256), (8e-3, 8.2e-3))),
    level=Forward(Curve((1, 256), (2e-4, 2.1e-4))),
    extend=Forward(Curve((1, 256), (4e-4, 4.2e-4))),
)


def made_up_policy(caps: Shape, shapes: Sequence[Shape] | None) -> Policy:
    """The policy of made-up costs."""
    return Policy(caps, CostModel(COSTS), shapes)


class MadeUpRounds(ShapeChooser):
    """The policy's chooser over rounds whose times and acceptance are made up."""

    def __init__(self, caps: Shape, policy: Policy) -> None:
        self._now, self._seconds = 0.0, {shape: COSTS.round(shape, 1, 0) for shape in policy.shapes}
        buffers = buffers_of(policy, MAX_BATCH, "cpu")
        super().__init__(caps, policy, clock=HostClock(lambda: self._now), buffers=buffers, learns_late=True)

    def begin(self, shape: Shape, b: int, keys: int) -> None:
        """As it is, at the time at which the round before would have ended."""
        super().begin(shape, b, keys)
        self._now += self._seconds[shape]

    def observe(self, served: ServedRound, kept: Sequence[int], drafted: Sequence[int] | None = None) -> None:
        """As it is, of other accepted tokens."""
        super().observe(served, [min(KEPT, served.shape.steps)] * len(kept))


class PolicyHost(Cost):
    """Captured rounds whose shapes one policy chooses."""

    host_us: Quartiles = Field(description=f"the worker's step and the engine's work around it, of {BLOCK} rounds")
    rounds_by_shape: dict[str, int]


class PolicyScenario(Strict):
    """One kind of batch."""

    batch: int
    sampled: bool
    policies: dict[str, PolicyHost]
    of_fixed: dict[str, Quartiles] = Field(description="the host's time over that of fixed, of each repeat")


class PolicyTimes(Strict):
    """One engine."""

    shape: str
    scenarios: dict[str, PolicyScenario]
    repeats: int
    rounds: int
    steal_share: float | None = Field(description="of the processor's time, taken by other machines")
    versions: dict[str, str]


class PoliciesReport(Strict):
    """`out/host-time.json` where policies are compared."""

    date: str
    engines: dict[str, PolicyTimes]
    aim: float
    machine: Machine


class Choosers:
    """One chooser per policy and kind of batch, which keeps what it has learned from run to run."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], ShapeChooser] = {}

    def __call__(self, run: Run, caps: Shape, captured: Sequence[Shape]) -> ShapeChooser:
        """The chooser of a run."""
        key = run.scenario.name, run.policy
        if key not in self._made:
            self._made[key] = _chooser(run.policy, caps, captured or shapes_within(caps))
        return self._made[key]


def _chooser(policy: str, caps: Shape, shapes: Sequence[Shape]) -> ShapeChooser:
    if policy == "auto":
        return MadeUpRounds(caps, made_up_policy(caps, shapes))
    return ShapeChooser(caps, None, shapes if policy == "random" else ())


def measure_policies(
    module: Any,
    engine: str,
    shape: Shape,
    batches: Sequence[tuple[int, float]],
    policies: Sequence[str],
    repeats: int,
    rounds: int,
) -> PolicyTimes:
    """Run every batch with every policy `repeats` times, interleaved, and once more to count.

    module: that drives the engine (`benchmarks.sglang_rounds`, `benchmarks.vllm_rounds`).
    """
    scenarios = scenarios_of(batches)
    kinds = [(one, policy) for one in scenarios for policy in policies]
    # The first runs of a policy are not measured: it looks at the shapes that it knows nothing of.
    runs = [Run(one, True, rounds, False, policy) for _ in range(repeats + 1) for one, policy in kinds]
    runs += [Run(one, True, rounds, True, policy) for one, policy in kinds]
    found: dict[tuple[str, str], list[list[Round]]] = {(one.name, policy): [] for one, policy in kinds}
    probe, ticks = Probe(time.thread_time_ns), read_ticks()
    with tempfile.TemporaryDirectory() as folder, probe.native_kernels():
        booted = module.boot(Path(folder), shape, max(batch for batch, _ in batches), made_up_policy)
        for run, measured in module.Rounds(booted, probe, Choosers()).run(runs):
            found[run.scenario.name, run.policy].append(measured)
    stolen = steal_share(ticks, read_ticks())
    reports = {}
    for one in scenarios:
        of = {policy: found[one.name, policy] for policy in policies}
        reports[one.name] = PolicyScenario(
            batch=one.batch,
            sampled=one.temperature > 0,
            policies={policy: _report(runs[1:-1], runs[-1], module.PHASES) for policy, runs in of.items()},
            of_fixed=_of_fixed(of) if "fixed" in of else {},
        )
    return PolicyTimes(
        shape=str(shape),
        scenarios=reports,
        repeats=repeats,
        rounds=rounds,
        steal_share=stolen,
        versions=installed_versions(("torch", engine, "eagle-plugin")),
    )


def host_of(one: Round) -> float:
    """Microseconds of the host for a round."""
    return sum(one.microseconds.values())


def block_means(rounds: Sequence[Round]) -> list[float]:
    """The host's mean time of each `BLOCK` rounds; of fewer rounds that of all."""
    times = [host_of(one) for one in rounds]
    blocks = [times[i : i + BLOCK] for i in range(0, len(times) - BLOCK + 1, BLOCK)] or [times]
    return [statistics.fmean(block) for block in blocks]


def _of_fixed(of: dict[str, list[list[Round]]]) -> dict[str, Quartiles]:
    """Of each repeat the ratio of the medians of the blocks."""
    medians = {policy: [statistics.median(block_means(run)) for run in runs[1:-1]] for policy, runs in of.items()}
    return {
        policy: quartiles([x / y for x, y in zip(found, medians["fixed"], strict=True)])
        for policy, found in medians.items()
        if policy != "fixed"
    }


def _report(runs: Sequence[Sequence[Round]], counted: Sequence[Round], phases: Sequence[str]) -> PolicyHost:
    return PolicyHost(
        **dict(cost_of(runs, counted, phases)),
        host_us=quartiles([statistics.median(block_means(run)) for run in runs]),
        rounds_by_shape=dict(Counter(str(one.shape) for run in runs for one in run)),
    )


def policies_report(engines: dict[str, PolicyTimes]) -> PoliciesReport:
    """The document."""
    return PoliciesReport(
        date=datetime.date.today().isoformat(), engines=engines, aim=AIM_RATIO, machine=describe_machine()
    )


def show_policies(engine: str, times: PolicyTimes) -> None:
    """Print one column per kind of batch and policy."""
    cells = [(name, policy, host) for name, one in times.scenarios.items() for policy, host in one.policies.items()]
    names, hosts = [f"{name}\n{policy}" for name, policy, _ in cells], [host for *_, host in cells]
    table = cost_table(f"{engine}: host time of a captured round in us, caps {times.shape}", names, hosts)
    table.add_row(f"host, of {BLOCK} rounds", *(f"{host.host_us.median:.0f}" for host in hosts))
    table.add_row("quartiles", *(f"{host.host_us.q1:.0f}, {host.host_us.q3:.0f}" for host in hosts))
    ratios = [times.scenarios[name].of_fixed.get(policy) for name, policy, _ in cells]
    table.add_row("of fixed", *("" if x is None else f"{x.median:.3f}" for x in ratios))
    table.add_row("quartiles", *("" if x is None else f"{x.q1:.3f}, {x.q3:.3f}" for x in ratios), end_section=True)
    for shape in sorted({shape for host in hosts for shape in host.rounds_by_shape}):
        table.add_row(f"rounds of {shape}", *(str(host.rounds_by_shape.get(shape, "")) for host in hosts))
    Console(width=140).print(table)
    steal = "not known" if times.steal_share is None else f"{100 * times.steal_share:.1f} %"
    print(f"Aim: auto at most {AIM_RATIO:.2f} of fixed. Processor time taken by other machines: {steal}.")
