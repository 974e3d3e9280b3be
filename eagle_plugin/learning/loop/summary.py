"""The result of the loop: `loop.json`, and the table that is printed at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.states.configs import NAMES
from eagle_plugin.bench.states.document import StatesReport
from eagle_plugin.learning.loop.settings import LoopError, LoopSettings
from eagle_plugin.learning.loop.steps import minutes

FORMAT = 1
WANTED_GAIN = 0.08  # of the accept length, which `make loop` is to show
SHAPES = {"tree16_t0": "tree of 16", "chain4_t0": "chain of 4"}
FIRST_SHAPE = "tree16_t0"


class PromptCounts(Strict):
    """How many prompts there were of each kind."""

    domain: str
    asked: int
    recorded: int = Field(description="requests that the server wrote down")
    trained_on: int = Field(description="rows of the feature store, those for the learning curve included")
    held_out: int = Field(description="prompts that nothing was trained on")


class AcceptLength(Strict):
    """Of one head, on the held-out prompts, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Accepted(Strict):
    """Before and after the training, for one shape of the draft."""

    before: AcceptLength
    after: AcceptLength


class StateRow(Strict):
    """One state of the benchmark at one number of clients; medians over the repeats."""

    state: str
    concurrency: int
    tokens_per_s: float
    tpot_ms: float | None
    ttft_ms: float
    accept_length: float | None = Field(description="of the shapes that the server chose")


class Swap(Strict):
    """What the exchange of the head did to a float32 server's requests."""

    requests: int
    during: int = Field(description="requests that ran while the head was exchanged")
    after: int = Field(description="requests that began after it")
    failed: int
    errors: list[str]
    responses_changed: int = Field(description="greedy answers that differ from those with the base head")
    seconds: float = Field(description="of `eagle-plugin deploy`")
    accept_length_before: float | None
    accept_length_after: float | None
    deployed: dict[str, Any] = Field(description="what `eagle-plugin deploy --json` printed")


class LoopReport(Strict):
    """`loop.json`."""

    format: int = FORMAT
    accept_length_before: float = Field(description="base head, held-out prompts, tree of 16 nodes, temperature 0")
    accept_length_after: float = Field(description="trained head, the same prompts and tree")
    gain: float = Field(description="after / before - 1")
    wanted_gain: float = WANTED_GAIN
    accept_lengths: dict[str, Accepted]
    prompts: PromptCounts
    states: list[StateRow]
    verdict: str
    swap: Swap | None = Field(description="null if it was left out (--no-swap)")
    training: dict[str, Any] | None
    settings: LoopSettings
    seconds: dict[str, float] = Field(description="of each step, of all runs together")
    total_seconds: float
    machine: Machine
    versions: dict[str, str]
    date: str

    @property
    def good(self) -> bool:
        """Whether the loop showed what it is to show."""
        swapped = self.swap is None or not (self.swap.failed or self.swap.responses_changed)
        return self.gain >= self.wanted_gain and swapped


def summarise(settings: LoopSettings, domain: str, folder: Path, seconds: dict[str, float], swap: bool) -> LoopReport:
    """Read what the steps wrote into the folder of the loop.

    Raises:
        LoopError: a file is missing or damaged.
    """
    states = StatesReport.model_validate(_read(folder / "benchmark/states.json"))
    traffic, details = _read(folder / "traffic.json"), _read(folder / "accept-details.json")
    lengths = accepted(details)
    first = lengths[FIRST_SHAPE]
    trained = states.heads.get("trained")
    return LoopReport(
        accept_length_before=first.before.mean,
        accept_length_after=first.after.mean,
        gain=round(first.after.mean / first.before.mean - 1, 4),
        accept_lengths=lengths,
        prompts=PromptCounts(
            domain=domain,
            asked=traffic["asked"],
            recorded=traffic["recorded"],
            trained_on=_lines(folder / "rows.jsonl"),
            held_out=settings.held_out,
        ),
        states=[
            StateRow(
                state=row.state,
                concurrency=row.concurrency,
                tokens_per_s=row.tokens_per_s.median,
                tpot_ms=row.tpot_ms.median if row.tpot_ms else None,
                ttft_ms=row.ttft_ms.median,
                accept_length=row.accept_length.median if row.accept_length else None,
            )
            for row in states.rows
        ],
        verdict=states.verdict,
        swap=Swap.model_validate(_read(folder / "swap.json")) if swap else None,
        training=trained.training if trained else None,
        settings=settings,
        seconds={name: round(value, 1) for name, value in seconds.items()},
        total_seconds=round(sum(seconds.values()), 1),
        machine=states.machine,
        versions=states.versions,
        date=states.date,
    )


def accepted(details: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Accepted]:
    """The accept lengths in the details of `eagle-plugin eval` with the base head first and the trained head second."""
    from eagle_plugin.learning.evaluate.responses import POOLED  # imports torch

    base, trained = details.values()
    # Of prompts of several sources, all of them together.
    before, after = (domains.get(POOLED) or next(iter(domains.values())) for domains in (base, trained))
    return {
        shape: Accepted(before=_length(before[shape]), after=_length(after[shape]))
        for shape in SHAPES
        if shape in before
    }


def _length(stats: dict[str, Any]) -> AcceptLength:
    return AcceptLength(mean=stats["accept_length"], low=stats["low"], high=stats["high"])


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError as error:
        raise LoopError(f"{path} cannot be read ({error.strerror}); remove {path.parent} to begin again") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoopError(f"{path} cannot be read ({error}); run the same command again") from error
    return dict(found)


def write_report(report: LoopReport, path: Path) -> None:
    """Write loop.json, whole or not at all."""
    try:
        write_json(report, path)
    except OSError as error:
        raise LoopError(f"cannot write {path} ({error.strerror or error}); name another folder with --out") from error


def print_report(report: LoopReport, console: Console) -> None:
    """Print the tables of the three states and of the accept lengths, and one line each for exchange and time."""
    table = Table(title="three states, medians of the repeats", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("clients", justify="right")
    table.add_column("state")
    for column in ("tokens/s", "TPOT ms", "accept length"):
        table.add_column(column, justify="right")
    for row in sorted(report.states, key=lambda one: one.concurrency):
        cells = [f"{row.tokens_per_s:.1f}", _number(row.tpot_ms, 1), _number(row.accept_length, 2)]
        table.add_row(str(row.concurrency), NAMES[row.state], *cells)  # type: ignore[index]
    console.print(table)
    table = Table(title=f"accept length on {report.prompts.held_out} held-out prompts (95 % interval)",
                  title_justify="left", box=SIMPLE_HEAD)  # fmt: skip
    for column in ("drafts", "base head", "trained head", "gain"):
        table.add_column(column)
    for shape, name in SHAPES.items():
        if (one := report.accept_lengths.get(shape)) is not None:
            change = f"{one.after.mean / one.before.mean - 1:+.1%}"
            table.add_row(name, _interval(one.before), _interval(one.after), change)
    console.print(table)
    prompts = report.prompts
    console.print(
        f"prompts: {prompts.domain}; {prompts.asked} asked, {prompts.recorded} recorded, "
        f"{prompts.trained_on} trained on, {prompts.held_out} held out",
        highlight=False,
    )
    if report.swap is not None:
        swap = report.swap
        console.print(
            f"exchange of the head in {swap.seconds:.1f} s: {swap.during} requests ran meanwhile, {swap.failed} of "
            f"{swap.requests} failed, {swap.responses_changed} responses changed",
            highlight=False,
        )
    console.print(report.verdict, highlight=False)
    wanted = "reached" if report.gain >= report.wanted_gain else "not reached"
    console.print(
        f"[bold]accept length {report.accept_length_before:.2f} -> {report.accept_length_after:.2f}, "
        f"{report.gain:+.1%}[/] (wanted {report.wanted_gain:.0%}: {wanted}); {minutes(report.total_seconds)} in all",
        highlight=False,
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _interval(one: AcceptLength) -> str:
    return f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"
