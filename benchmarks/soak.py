"""Many requests of all kinds against one server; afterwards nothing may be lost.

    python benchmarks/soak.py --engine sglang [--requests 20000] [--every 1000] [--out out]

The server has a tiny target and head in float32, draft shapes at random (EAGLE_POLICY=random) and looked-up branches.
Requests come from a seeded stream (`benchmarks/soak_requests.py`): lengths, shared beginnings, all sampling parameters,
penalties, seeds, stop conditions, log probabilities, n > 1, grammars, drafts by request, in SGLang a LoRA adapter,
streams whose client goes away, 1 to 48 at a time. While they run, the head is exchanged for another one and back
(EAGLE_DEPLOY), requests are paused in each way of the engine, and in SGLang the weights are read again. The prefix
cache is flushed before each check.

After every --every requests the server must be as it was after the first ones: no request and no token of the cache in
use, the same greedy texts of 8 probes, their accept length in the interval of the first ones, as many threads and open
files, memory within 1 %. The counts of the metrics must agree with each other. The report is out/soak-ENGINE.json; the
exit code is 1 if a rule is broken, and the report names it; benchmarks/soak_shrink.py finds the requests. An
interrupted run continues with --resume, on a new server, from the request after the last check.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
import psutil
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))  # before this folder

from bigram_models import bigram_eagle3_head, bigram_target
from serving import tiny_spec, vllm_spec
from tiny_adapters import write_adapter

from benchmarks.soak_checks import REQUEST_SECONDS, Check, Report, ask_probes, faults_of, plugin_counts, wait_idle
from benchmarks.soak_events import HEAD, MAILBOX, OTHER_HEAD, TARGET, Events
from benchmarks.soak_requests import ADAPTER, Ask, ask_of, at_once
from eagle_plugin.bench.choices import default_engine
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.preparation import at_least
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import Server, check_worker
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.tables import plain_table
from eagle_plugin.common.deploy_folder import FOLDER
from eagle_plugin.policy.metric_table import ACCEPTED_TOKENS, DRAFTED_TOKENS, TOTALS, VERIFY_ROUNDS

MIB = 2**20
NOISE = 0.02  # of the target's layers: greedy text depends on all tokens before, and some drafts are right


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine = default_engine()
    parser.add_argument("--engine", choices=sorted(ENGINES), default=engine, help=f"default: {engine}")
    parser.add_argument("--requests", type=at_least(1), default=20_000, metavar="N", help="default: 20000")
    parser.add_argument("--every", type=at_least(1), default=1000, metavar="N", help="requests per check (1000)")
    parser.add_argument("--minutes", type=float, default=180.0, help="end after so many, at a check (default: 180)")
    parser.add_argument("--seed", type=int, default=1, help="of the stream (default: 1)")
    parser.add_argument("--rounds", choices=("synchronous", "ahead"), default="ahead", help="of the scheduler")
    parser.add_argument("--resume", action="store_true", help="go on after the last check of the report")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the report and of logs/")
    return parser.parse_args(argv)


def spec_of(options: argparse.Namespace, folder: Path) -> ServerSpec:
    """The server; its models are written into `folder`."""
    target = bigram_target(folder / TARGET, noise=NOISE)
    head = bigram_eagle3_head(folder / HEAD, target)
    bigram_eagle3_head(folder / OTHER_HEAD, target, wrong=1.0, seed=13)
    (folder / MAILBOX).mkdir(mode=0o700)
    environment = {"EAGLE_POLICY": "random", "EAGLE_LOOKUP": "on", FOLDER: str(folder / MAILBOX)}
    sizes = {"context_length": 512, "max_total_tokens": 8192, "max_running_requests": 32}
    if options.engine == "vllm":
        environment |= {"PYTHONPATH": "", "VLLM_SERVER_DEV_MODE": "1"}  # has the routes of pauses
        return vllm_spec(
            target, head, (3, 2, 8), environment=environment, is_async=options.rounds == "ahead", name="soak", **sizes
        )
    environment |= {"EAGLE_OVERLAP": "1"} if options.rounds == "ahead" else {}
    adapter = write_adapter(folder / ADAPTER, target)
    flags = ("--skip-server-warmup", "--enable-metrics", "--enable-lora", "--max-loras-per-batch", "2")
    flags += ("--lora-paths", f"{ADAPTER}={adapter}")
    return tiny_spec(target, head, (3, 2, 8), environment=environment, extra_flags=flags, name="soak", **sizes)


async def send(client: httpx.AsyncClient, ask: Ask) -> str:
    """Send one request; what came of it."""
    try:
        if not ask.body.get("stream"):
            return str((await client.post("/v1/completions", json=ask.body)).status_code)
        async with client.stream("POST", "/v1/completions", json=ask.body) as answer:
            chunks = 0
            async for _ in answer.aiter_lines():
                chunks += 1
                if ask.leaves_after is not None and chunks > ask.leaves_after:
                    return "left"
            return str(answer.status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


async def send_asks(url: str, asks: Iterable[tuple[Ask, int]]) -> Counter[str]:
    """Send requests in their order, each when fewer than so many run."""
    found: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False, limits=limits) as client:
        running: set[asyncio.Task[str]] = set()
        for ask, most in asks:
            while len(running) >= most:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                found.update(task.result() for task in done)
            running.add(asyncio.create_task(send(client, ask)))
        found.update(await asyncio.gather(*running))
    return found


class Soak:
    """One server, what it answered at its start, and its checks."""

    def __init__(self, server: Server, options: argparse.Namespace, models: Path) -> None:
        """models: the folder of `spec_of`."""
        self.server, self.options = server, options
        self._events = Events(server, options.engine, models)
        self.answered: Counter[str] = Counter()
        self.began = time.monotonic()
        self.expected = ask_probes(server)
        self.own: list[Check] = []  # of this server

    async def ask(self, asks: Iterable[tuple[Ask, int]]) -> None:
        """Send requests, and let the events happen while they run."""
        answered, _ = await asyncio.gather(send_asks(self.server.url, asks), self._events.happen())
        self.answered += answered

    def check(self, requests: int) -> Check:
        """What the server is like now; faults against the first check of this server."""
        self.server.check_alive()
        running, used = wait_idle(self.server, self.options.engine)
        before = plugin_counts(self.server)
        answers = ask_probes(self.server)
        counts = plugin_counts(self.server)
        name = {key: metric.exported for key, metric in TOTALS.items()}
        rounds, tokens = (counts[name[key]] - before[name[key]] for key in ("rounds", "tokens"))
        processes = [psutil.Process(pid) for pid in self.server.members()]
        check = Check(
            requests=requests,
            seconds=round(time.monotonic() - self.began, 1),
            answered=dict(sorted(self.answered.items())),
            events=dict(self._events.made),
            running=running,
            cache_in_use=used,
            memory_mib=round(self.server.memory_bytes() / MIB, 1),
            threads=sum(process.num_threads() for process in processes),
            files=sum(process.num_fds() for process in processes),
            accept_length=round(tokens / rounds, 4) if rounds else 0.0,
            same_responses=answers == self.expected,
            drafted=counts[DRAFTED_TOKENS.exported],
            accepted=counts[ACCEPTED_TOKENS.exported],
            verify_rounds=counts[VERIFY_ROUNDS.exported],
            shape_rounds=counts[name["rounds"]],
            faults=[],
        )
        check.faults += faults_of(check, self.own)
        self.own.append(check)
        return check


def run(options: argparse.Namespace, steps: Steps) -> Report:
    """Serve and ask. Raises ServerError, HTTPError or ValueError."""
    path = options.out / f"soak-{options.engine}.json"
    earlier = Report.model_validate_json(path.read_bytes()).checks if options.resume and path.is_file() else []
    report = Report(
        engine=options.engine,
        seed=options.seed,
        every=options.every,
        machine=describe_machine(),
        checks=list(earlier),
    )
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(options, Path(folder))
        with Server.of(spec, (options.out / "logs").resolve()) as server:
            with steps.step(f"starting {server.label}") as step:
                server.wait_ready(progress=step.update)
                steps.log(check_worker(server, spec.mode))
            soak = Soak(server, options, Path(folder))
            first = earlier[-1].requests if earlier else 0
            with steps.step("asking") as step:
                while first < options.requests and time.monotonic() - soak.began < 60 * options.minutes:
                    count = min(options.every, options.requests - first)
                    asks = (ask_of(options.engine, options.seed, number) for number in range(first, first + count))
                    asyncio.run(soak.ask((ask, at_once(ask.number)) for ask in asks))
                    first += count
                    report.checks.append(soak.check(first))
                    write_json(report, path)
                    step.update(f"{first} of {options.requests} requests, {len(report.faults)} faults")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, print the table and write the report; 1 after a broken rule or a failure, whose message is printed."""
    options, steps = parse(argv), Steps(Console())

    def command() -> int:
        report = run(options, steps)
        columns = ("requests", "s", "MiB", "threads", "files", "accept", "same answers", "faults")
        table = plain_table(f"soak, {report.engine}", "", columns)
        shown = report.checks[:: max(1, len(report.checks) // 20)]
        for one in [*shown, *([] if shown[-1] is report.checks[-1] else [report.checks[-1]])]:
            cells = (one.requests, f"{one.seconds:.0f}", one.memory_mib, one.threads, one.files, one.accept_length)
            table.add_row(*map(str, (*cells, one.same_responses, len(one.faults))))
        steps.console.print(table)
        for fault in report.faults[:20]:
            steps.console.print(fault)
        return int(bool(report.faults))

    return exit_status("soak", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
