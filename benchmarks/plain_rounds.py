"""Measure what a plain round of the plugin costs beside a step of vLLM without speculation, step by step.

    python benchmarks/plain_rounds.py [--requests 1 4 16 32] [--steps 300] [--json out/plain-rounds-vllm.json]

Where the policy drafts nothing, the plugin should cost nothing. Servers that are measured for ten seconds each do not
show a difference of a few percent on a machine whose speed changes within seconds. Here every engine runs in a process
of its own with the same requests, and they take one step by turns, so that the steps of a pair are a tenth of a second
apart. Requests come and go: the steps with prompts are in `all`, those without are `decode`. The sides:

  vllm           vLLM without the plugin, without speculation
  plugin         the plugin's runner, which never drafts, with the states of each step kept for the head
  small-pages    the same with EAGLE_HUGE_PAGES=0

A ratio is the side's processor time over that of `vllm`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vllm_process import ENVIRONMENT
from eagle_plugin.bench.choices import resolve_head, resolve_target
from eagle_plugin.bench.machine import Machine, describe_machine
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import Quartiles, Strict, quartiles
from eagle_plugin.bench.steal import read_ticks, steal_share
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SIDES: dict[str, dict[str, str]] = {
    "vllm": {"EAGLE_PLUGIN": "0"},
    "plugin": {"EAGLE_PLUGIN": "1", "EAGLE_HUGE_PAGES": "1"},
    "small-pages": {"EAGLE_PLUGIN": "1", "EAGLE_HUGE_PAGES": "0"},
}
PYTHON = ROOT / ".venv-vllm/bin/python"
WARM_STEPS = 20  # not measured


class Step(NamedTuple):
    """One step of one side."""

    processor: float  # seconds
    wall: float
    tokens: int  # that it computed


class Cost(Strict):
    """The steps of one side."""

    ms: float = Field(description="processor time of all steps over their number")
    ratio: float = Field(description="processor time of all steps over that of vLLM's")
    pairs: Quartiles = Field(description="the same ratio, of each pair of steps")
    wall_ratio: float


class Row(Strict):
    """So many requests at a time."""

    requests: int
    decode_steps: int = Field(description="in which every side computed one token of each request")
    steps: int
    decode: dict[str, Cost]
    all: dict[str, Cost]
    steal: float | None = Field(description="part of the wanted processor time that the host gave to others")


class PlainRounds(Strict):
    """`out/plain-rounds-vllm.json`."""

    temperature: float
    threads: int
    rows: list[Row]
    target: str
    versions: dict[str, str]
    machine: Machine
    date: str


class Side:
    """One engine in a process of its own."""

    def __init__(self, name: str, command: Sequence[str], threads: int, log: Path) -> None:
        self.name, self._log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=os.environ
                | ENVIRONMENT
                | SIDES[name]
                | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.versions: dict[str, str] = json.loads(self._read())

    def step(self) -> Step:
        """Let it take one step."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # where it ended, reading says so
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        return Step(*json.loads(self._read()))

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise UserError(f"the engine of the side {self.name} ended; its last line is: {last[0]}")
        return line


def cost(side: list[Step], vllm: list[Step]) -> Cost:
    """What steps cost beside those of vLLM in the same turns."""
    ours, theirs = (sum(step.processor for step in steps) for steps in (side, vllm))
    return Cost(
        ms=round(1e3 * ours / len(side), 2),
        ratio=round(ours / theirs, 3),
        pairs=quartiles([a.processor / b.processor for a, b in zip(side, vllm, strict=True)]),
        wall_ratio=round(sum(step.wall for step in side) / sum(step.wall for step in vllm), 3),
    )


def measure(
    requests: int, options: argparse.Namespace, models: Sequence[str], progress: Steps
) -> tuple[Row, dict[str, str]]:
    """Let all sides take their steps by turns; returns the versions of their packages as well."""
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as folder, progress.step(f"{requests} requests") as shown:
        try:
            for name in SIDES:
                shown.update(f"starting {name}")
                child = [str(ROOT / "benchmarks/plain_rounds_vllm.py"), name, *models, str(requests)]
                command = [str(options.python), *child, str(options.temperature)]
                sides.append(Side(name, command, options.threads, Path(folder, name)))
            taken: dict[str, list[Step]] = {name: [] for name in SIDES}
            before = read_ticks()
            for number in range(WARM_STEPS + options.steps):
                shown.update("steps", number / (WARM_STEPS + options.steps))
                first = number % len(sides)
                for side in (*sides[first:], *sides[:first]):
                    taken[side.name].append(side.step())
            steal = steal_share(before, read_ticks())
        finally:
            for side in sides:
                side.stop()
    turns = [dict(zip(taken, steps, strict=True)) for steps in zip(*taken.values(), strict=True)][WARM_STEPS:]
    decode = [turn for turn in turns if all(step.tokens == requests for step in turn.values())]
    if not decode:
        raise UserError(f"--steps {options.steps}: no step of {requests} requests was without prompts; give more")

    def costs(chosen: list[dict[str, Step]]) -> dict[str, Cost]:
        return {name: cost([turn[name] for turn in chosen], [turn["vllm"] for turn in chosen]) for name in SIDES}

    row = Row(
        requests=requests,
        decode_steps=len(decode),
        steps=len(turns),
        decode=costs(decode),
        all=costs(turns),
        steal=None if steal is None else round(steal, 4),
    )
    return row, sides[-1].versions


def show(report: PlainRounds, console: Console) -> None:
    """Print one table."""
    table = Table(title=f"processor time of a step, T = {report.temperature:g}, {report.threads} threads")
    for column in ("requests", "steps", "side", "ms", "ratio to vllm", "quartiles of pairs"):
        table.add_column(column, justify="left" if column in ("steps", "side") else "right")
    for row in report.rows:
        for kind, costs in ((f"decode ({row.decode_steps})", row.decode), (f"all ({row.steps})", row.all)):
            for name, one in costs.items():
                pairs = "" if name == "vllm" else f"{one.pairs.q1:.2f} to {one.pairs.q3:.2f}"
                table.add_row(str(row.requests), kind, name, f"{one.ms:.1f}", f"{one.ratio:.3f}", pairs)
            table.add_section()
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32], help="at a time, a row for each")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=300, help="of each side (default: 300)")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of an engine (default: 1)")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="folder or name of the target")
    parser.add_argument("--head", help="default: the shipped head")
    parser.add_argument("--python", type=Path, default=PYTHON, help="Python that has vLLM and the plugin")
    parser.add_argument("--json", type=Path, default=ROOT / "out/plain-rounds-vllm.json", metavar="FILE")
    options = parser.parse_args()
    if min(*options.requests, options.steps, options.threads) < 1 or options.temperature < 0:
        parser.error("wanted requests, steps and threads of at least 1, and a temperature of at least 0")
    if not options.python.exists():
        parser.error(f"--python {options.python} does not exist: make it by `make env-vllm`")
    console = Console(width=120)
    target = resolve_target(options.target, console)
    models = [str(target), str(resolve_head(options.head, target))]
    progress = Steps(console)
    rows, versions = zip(*(measure(n, options, models, progress) for n in options.requests), strict=True)
    report = PlainRounds(
        temperature=options.temperature,
        threads=options.threads,
        rows=list(rows),
        target=target.name,
        versions=versions[0],
        machine=describe_machine(),
        date=datetime.date.today().isoformat(),
    )
    write_json(report, options.json)
    show(report, console)
    console.print(f"Written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
