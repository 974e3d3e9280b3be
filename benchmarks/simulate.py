"""Predicts the speed-up of speculative decoding on GPUs: the plugin's policy on simulated devices.

    python benchmarks/simulate.py [--json out/simulate.json]
    python benchmarks/simulate.py --record out/trace.npz     # the shipped head on its target, on this machine's CPU

SIMULATED: no GPU runs. A round's time is a roofline with stated efficiencies (benchmarks/simulate_targets.py), its
accepted tokens come from traces (benchmarks/simulate_traces.py), its shape from eagle_plugin/policy/policy.py as it is
served. Prefills, queues, the host and the memory's size are left out. Speed-ups are tokens per second over those of
plain decoding without a head.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.roofline import B200, H100, H200
from benchmarks.simulate_record import record
from benchmarks.simulate_rounds import accept_length, fixed_rate, plain_rate, serve_policy
from benchmarks.simulate_targets import OVERLAPPED, TARGETS, Machine
from benchmarks.simulate_traces import CAPS, Outcomes, Trace, synthetic_trace
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.report import shape_of
from eagle_plugin.policy.shapes import shapes_within

DEVICES = {device.name: device for device in (H100, H200, B200)}
CONCURRENCY = tuple(2**n for n in range(10))
STATIC = {
    "chain 3": Shape.chain(3), "chain 7": Shape.chain(7), "tree 3/4/16": Shape(3, 4, 16), "tree 7/4/64": CAPS,
}  # fmt: skip
PARALLEL, PARALLEL_LAYERS = "P-EAGLE 7", 4  # a head of so many layers, whose chains are accepted as often as EAGLE-3's
RECORDED = "recorded: SmolLM2-135M and the shipped head"
TRACE = Path(__file__).with_name("traces") / "smollm2-135m.npz"
ROUNDS, WARM_UP = 400, 300
FEWEST = 10_000  # rounds times requests that count, so that few requests have enough rounds


class Row(BaseModel):
    """The predicted speed-ups at one concurrency."""

    model_config = ConfigDict(extra="forbid")

    device: str
    target: str
    acceptance: str
    requests: int
    plain_tokens_per_second: float
    speed_ups: dict[str, float]
    policy_shapes: dict[str, int]  # rounds by shape
    best_fixed: float  # speed-up of the best of all shapes that the policy chooses from, known by enumeration
    best_fixed_shape: str
    best_chain: float  # of the chains among them, plain decoding included, known by enumeration
    best_chain_shape: str
    adaptive_chain: float  # of the same policy with chains alone: one that has to learn which chain is best


class Report(BaseModel):
    """Everything that a run says."""

    model_config = ConfigDict(extra="forbid")

    is_simulated: bool = True
    accept_lengths: dict[str, dict[str, float]]
    rows: list[Row]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--requests", nargs="+", type=int, default=CONCURRENCY, help="concurrent requests")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each request's prefix")
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help=f"rounds that count, after {WARM_UP} others; more of them for few requests",
    )
    parser.add_argument(
        "--shapes", nargs="+", type=shape_of, default=[], metavar="D/K/W", help=f"more columns, within {CAPS}"
    )
    parser.add_argument("--trace", type=Path, default=TRACE, help="a recorded trace")
    parser.add_argument("--json", type=Path, default=Path("out/simulate.json"))
    parser.add_argument("--record", type=Path, help="record a trace into this file, and end")
    parser.add_argument("--prompts", type=int, default=24, help="of --record")
    parser.add_argument("--tokens", type=int, default=48, help="of --record, per prompt")
    options = parser.parse_args(arguments)
    for name in ("requests", "context", "rounds", "prompts"):
        value = getattr(options, name)
        if min(value if isinstance(value, (list, tuple)) else [value]) < 1:
            parser.error(f"--{name} is {value}, wanted at least 1")
    if options.tokens <= CAPS.steps:
        parser.error(f"--tokens is {options.tokens}, wanted more than {CAPS.steps}: the target's path must be known")
    return options


def load_trace(path: Path) -> Trace:
    try:
        return Trace.load(path)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"--trace {path} is no trace of this program ({error}): record one with --record") from error


def predict(
    options: argparse.Namespace,
    outcomes: dict[str, Outcomes],
    of_chains: dict[str, Outcomes],
    of_given: dict[str, Outcomes],
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """The rows of all devices, targets and numbers of requests, and the accept lengths by trace.

    of_chains: the outcomes of shapes without branches; of_given: of those that the user asks for.
    """
    cases = [(target, target) for target in options.targets]
    if "Llama-3.1-8B" in options.targets:
        cases.append(("Llama-3.1-8B", RECORDED))
    used = [trace for _, trace in cases]
    every = {
        name: {shape: accept_length(of, shape) for shape in of.shapes} for name, of in outcomes.items() if name in used
    }
    lengths = {name: {label: of[shape] for label, shape in STATIC.items()} for name, of in every.items()}
    rows = []
    for device in options.devices:
        for target, trace in cases:
            machine = Machine(DEVICES[device], TARGETS[target], OVERLAPPED)
            parallel = machine._replace(layers_of_head=PARALLEL_LAYERS, is_parallel=True)
            for b in options.requests:
                plain = plain_rate(machine, b, options.context)
                rounds = max(options.rounds, options.rounds * FEWEST // (ROUNDS * b))
                served = serve_policy(machine, outcomes[trace], CAPS, b, options.context, WARM_UP, rounds)
                chains = serve_policy(
                    machine, of_chains[trace], Shape.chain(CAPS.steps), b, options.context, WARM_UP, rounds
                )
                speed_ups = {"policy": served.rate / plain}
                fixed = {
                    shape: fixed_rate(machine, n, shape, b, options.context) / plain
                    for shape, n in every[trace].items()
                }
                best = max(fixed, key=fixed.__getitem__)
                best_chain = max((x for x in fixed if x.topk == 1), key=fixed.__getitem__)
                for label, shape in STATIC.items():
                    speed_ups[label] = fixed[shape]
                for shape in options.shapes:
                    n = accept_length(of_given[trace], shape)
                    speed_ups[str(shape)] = fixed_rate(machine, n, shape, b, options.context) / plain
                chain = fixed_rate(parallel, lengths[trace]["chain 7"], Shape.chain(7), b, options.context)
                rows.append(
                    Row(
                        device=device,
                        target=target,
                        acceptance="synthetic" if trace == target else trace,
                        requests=b,
                        plain_tokens_per_second=plain,
                        speed_ups=speed_ups | {PARALLEL: chain / plain},
                        policy_shapes=dict(served.shapes.most_common()),
                        best_fixed=fixed[best],
                        best_fixed_shape=str(best),
                        best_chain=fixed[best_chain],
                        best_chain_shape=str(best_chain),
                        adaptive_chain=chains.rate / plain,
                    )
                )
    return rows, lengths


def show_rows(rows: list[Row], console: Console) -> None:
    """A table per device, target and acceptance."""
    for title in dict.fromkeys((row.device, row.target, row.acceptance) for row in rows):
        out = Table(title="SIMULATED speed-up over plain decoding: " + ", ".join(title))
        mine = [row for row in rows if (row.device, row.target, row.acceptance) == title]
        for column in (
            "requests",
            "plain, tokens/s",
            *mine[0].speed_ups,
            "policy's shape, rounds",
            "best fixed shape",
            "best chain",
        ):
            out.add_column(column, justify="right", no_wrap=True)
        for row in mine:
            shape, count = next(iter(row.policy_shapes.items()))
            best = max(row.speed_ups.values())
            cells = [f"{x:.2f}" + ("*" if x == best else "") for x in row.speed_ups.values()]
            last = [f"{row.best_fixed_shape}, {row.best_fixed:.2f}", f"{row.best_chain_shape}, {row.best_chain:.2f}"]
            last.append(f"{row.adaptive_chain:.2f}")
            share = f"{shape}, {count / sum(row.policy_shapes.values()):.0%}"
            out.add_row(str(row.requests), f"{row.plain_tokens_per_second:.0f}", *cells, share, *last)
        console.print(out)


def run(options: argparse.Namespace, console: Console) -> Report:
    shapes = shapes_within(CAPS)
    traces = {RECORDED: load_trace(options.trace)} | {name: synthetic_trace(name) for name in options.targets}
    outcomes, of_chains, of_given = (
        {name: Outcomes.of(trace, of) for name, trace in traces.items()} if of else {}
        for of in (shapes, [shape for shape in shapes if shape.topk == 1], options.shapes)
    )
    rows, lengths = predict(options, outcomes, of_chains, of_given)
    show_rows(rows, console)
    others = {
        "best_fixed": "best fixed shape",
        "best_chain": "best chain, known for each number of requests",
        "adaptive_chain": "same policy with chains alone",
    }
    for name, other in others.items():
        ratios = [row.speed_ups["policy"] / getattr(row, name) for row in rows]
        console.print(f"The policy has {min(ratios):.3f} to {max(ratios):.3f} times the simulated speed of the {other}")
    return Report(accept_lengths=lengths, rows=rows)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=160 + 10 * len(options.shapes))
    if options.record:
        trace = record(options.prompts, options.tokens, console)
        trace.save(options.record)
        console.print(f"{len(trace.scores)} positions of {len(trace.starts)} responses, written to {options.record}")
        return 0
    report = run(options, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(report, options.json)
    console.print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
