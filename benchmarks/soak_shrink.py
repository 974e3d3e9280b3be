"""Cut a failing stream of benchmarks/soak.py to the fewest requests that still fail, and write them as a test.

    python benchmarks/soak_shrink.py out/soak-sglang.json [--attempts 60] [--out out]

The first check of the report that broke a rule names the requests: those since the check before it. They are sent again
to a new server, then parts of them (delta debugging: Zeller and Hildebrandt, IEEE TSE 2002), each until nothing runs;
what fails is cut further, at last to one request at a time. After a failure the next part gets a new server. Growing
memory, threads and files and a falling accept length need many requests and are not looked for. The result is
out/test_soak_ENGINE.py, which pytest runs. Exit code 1: the requests fail no more when they are sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak import send_asks, spec_of
from benchmarks.soak_checks import Report, ask_probes, leftovers, wait_idle
from benchmarks.soak_requests import Ask, ask_of, at_once
from eagle_plugin.bench.outcome import exit_status
from eagle_plugin.bench.preparation import at_least
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.common.atomic_io import write_output

IDLE_SECONDS = 5.0  # after the last answer of a part, in which a server gives back what it holds
# In the sentences of `soak_checks.faults_of`: what only a long stream shows.
OF_LONG_STREAMS = ("memory grew", " are open, ", "accept length is")
TEST = '''"""Found by benchmarks/soak.py ({engine}): {fault}."""

import json

from benchmarks.soak_shrink import Replay

ASKS = json.loads(r"""{asks}""")


def test_requests_of_a_soak(tmp_path):
    with Replay("{engine}", tmp_path) as replay:
        assert replay.faults(ASKS, together={together}) == []
'''


class Replay:
    """Sends parts of a stream to a server that lives as long as nothing fails."""

    def __init__(self, engine: str, folder: Path) -> None:
        """folder: of the models, and of the logs."""
        self._options = argparse.Namespace(engine=engine, rounds="ahead")
        self._folder, self._stack = folder, contextlib.ExitStack()
        self._server: Server | None = None
        self._expected: list[str] = []

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *ended: object) -> None:
        self._stack.close()

    def _started(self) -> Server:
        if self._server is None:
            spec = spec_of(self._options, Path(self._stack.enter_context(tempfile.TemporaryDirectory())))
            server = self._stack.enter_context(Server.of(spec, (self._folder / "logs").resolve()))
            server.wait_ready()
            self._expected = ask_probes(server)
            self._server = server
        return self._server

    def faults(self, asks: Sequence[Ask | Sequence[object]], together: bool = True) -> list[str]:
        """What is wrong after these requests; together: as many at a time as the stream has them, or one by one."""
        server = self._started()
        made = [Ask(*ask) for ask in asks]
        try:
            answered = asyncio.run(
                send_asks(server.url, [(ask, at_once(ask.number) if together else 1) for ask in made])
            )
            server.check_alive()
            running, used = wait_idle(server, self._options.engine, IDLE_SECONDS)
            found = leftovers(running, used, ask_probes(server) == self._expected, answered)
        except (ServerError, httpx.HTTPError) as error:
            found = [f"the server ended: {str(error) or type(error).__name__}"]
        if found:  # its state is not that of a new server
            self._stack.close()
            self._server = None
        return found


def shrunk(numbers: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """The part of a failing list of which every smaller part, cut at the ends or in the middle, passes (ddmin)."""
    kept, parts = list(numbers), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        rests = [[x for x in kept if x not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        failing = next((one for one in [*chunks, *rests] if fails(one)), None)
        if failing is not None:
            parts = 2 if failing in chunks else max(len(chunks) - 1, 2)
            kept = failing
        elif size == 1:
            break
        else:
            parts = min(2 * len(chunks), len(kept))
    return kept


def first_fault(report: Report) -> tuple[int, int, str] | None:
    """The requests from the check before the first fault to it, and its sentence; None without one to look for."""
    before = 0
    for check in report.checks:
        found = [fault for fault in check.faults if not any(part in fault for part in OF_LONG_STREAMS)]
        if found:
            return before, check.requests, found[0]
        before = check.requests
    return None


def bounded(attempts: int, fails: Callable[[Sequence[int]], bool]) -> Callable[[Sequence[int]], bool]:
    """`fails` that says no after so many attempts: what was found until then is kept."""
    numbered = itertools.count(1)
    return lambda numbers: next(numbered) <= attempts and fails(numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Shrink; prints what is left and where the test is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="out/soak-ENGINE.json")
    parser.add_argument("--attempts", type=at_least(1), default=60, metavar="N", help="streams to try (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the test and of logs/")
    options, steps = parser.parse_args(argv), Steps(Console())

    def command() -> int:
        report = Report.model_validate_json(options.report.read_bytes())
        found = first_fault(report)
        if found is None:
            raise ValueError(
                f"{options.report} has no fault that a few requests can show; run benchmarks/soak.py longer"
            )
        first, last, fault = found
        asks = {number: ask_of(report.engine, report.seed, number) for number in range(first, last)}
        with Replay(report.engine, options.out) as replay, steps.step("asking again") as step:

            def fails(numbers: Sequence[int]) -> bool:
                faults = replay.faults([asks[number] for number in numbers])
                step.update(f"{len(numbers)} requests: {faults[0] if faults else 'nothing'}")
                return bool(faults)

            if not fails(sorted(asks)):
                steps.log(f"requests {first} to {last - 1} fail no more ({fault})")
                return 1
            left = shrunk(sorted(asks), bounded(options.attempts, fails))
            kept = [asks[number] for number in left]
            together = not replay.faults(kept, together=False)
        path = options.out / f"test_soak_{report.engine}.py"
        text = TEST.format(engine=report.engine, fault=fault, asks=json.dumps(kept, indent=1), together=together)
        write_output(path, [text])
        steps.log(f"{len(left)} of {last - first} requests fail still: {path}")
        return 0

    return exit_status("soak_shrink", steps.console, command)


if __name__ == "__main__":
    raise SystemExit(main())
