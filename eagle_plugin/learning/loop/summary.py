"""Sums up the loop: writes loop.json from what the stages of its job left, and prints it as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eagle_plugin.bench.machine import Machine
from eagle_plugin.bench.quartiles import Strict
from eagle_plugin.bench.states.configs import NAMES
from eagle_plugin.bench.states.document import StatesReport
from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.json_files import read_object
from eagle_plugin.learning.loop.prompts import DOMAIN, LoopError

FORMAT = 1
AGAIN = "remove it and run the same command again"
WANTED_GAIN = 0.08  # of the accept length, which `make loop` is to show
SHAPES = {"tree16_t0": "tree of 16", "chain4_t0": "chain of 4", "chain7_t0": "chain of 7"}  # the last on a GPU
FIRST_SHAPE = "tree16_t0"


class Length(Strict):
    """The accept length of one head on the held-out prompts, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


class LoopReport(Strict):
    """`loop.json`."""

    format: int = FORMAT
    accept_length_before: float = Field(description="base head, held-out prompts, tree of 16 nodes, temperature 0")
    accept_length_after: float = Field(description="trained head, the same prompts and tree")
    gain: float = Field(description="after / before - 1")
    wanted_gain: float = WANTED_GAIN
    accept_lengths: dict[str, dict[str, Length]] = Field(description="of each shape, before and after the training")
    prompts: dict[str, Any] = Field(description="the domain, and how many were asked, recorded, held out")
    states: list[dict[str, Any]] = Field(description="medians of each state of the benchmark at each number of clients")
    verdict: str
    swap: dict[str, Any] | None = Field(description="what the exchange did to the requests; null if it was left out")
    training: dict[str, Any] | None
    settings: dict[str, Any] = Field(description="the recipe of the job")
    seconds: dict[str, float] = Field(description="of each stage, of all runs together")
    total_seconds: float
    machine: Machine
    versions: dict[str, str]
    date: str

    @property
    def good(self) -> bool:
        """Whether the loop showed what it is to show."""
        swapped = self.swap is None or not (self.swap["failed"] or self.swap["responses_changed"])
        return self.gain >= self.wanted_gain and swapped


def summarise(out: Path, data: Path, swap: bool) -> None:
    """Write `out`/loop.json from the files of the job.

    Raises:
        LoopError: a file is missing or damaged.
    """
    states = StatesReport.model_validate(_read(out / "benchmark/states.json"))
    lineage = _read(out / "lineage.json")
    seconds = {name: stage["seconds"] for name, stage in lineage["stages"].items()}
    lengths = accepted(_read(out / "accept-details.json"))
    first, settings = lengths[FIRST_SHAPE], lineage["recipe"]
    trained, own = states.heads.get("trained"), settings["traffic"]["prompts"]
    report = LoopReport(
        accept_length_before=first["before"].mean,
        accept_length_after=first["after"].mean,
        gain=round(first["after"].mean / first["before"].mean - 1, 4),
        accept_lengths=lengths,
        prompts={
            "domain": DOMAIN if own is None else Path(own).name,
            "asked": settings["traffic"]["count"],
            "recorded": (data / "recorded.jsonl").read_bytes().count(b"\n"),
            "held_out": settings["traffic"]["held_out"],
        },
        states=[
            {"state": row.state, "concurrency": row.concurrency}
            | {name: _median(row, name) for name in ("tokens_per_s", "tpot_ms", "ttft_ms", "accept_length")}
            for row in states.rows
        ],
        verdict=states.verdict,
        swap=_read(out / "swap.json") if swap else None,
        training=trained.training if trained else None,
        settings=settings,
        seconds=seconds,
        total_seconds=round(sum(seconds.values()), 1),
        machine=states.machine,
        versions=states.versions,
        date=states.date,
    )
    write_output(out / "loop.json", [report.model_dump_json(indent=2), "\n"])


def accepted(details: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Length]]:
    """The accept lengths in the details of `eagle-plugin eval` with the base head first and the trained head second."""
    from eagle_plugin.learning.evaluate.responses import POOLED  # imports torch

    # Of prompts of several sources, all of them together.
    heads = [domains.get(POOLED) or next(iter(domains.values())) for domains in details.values()]
    return {
        shape: {
            name: Length(mean=head[shape]["accept_length"], low=head[shape]["low"], high=head[shape]["high"])
            for name, head in zip(("before", "after"), heads, strict=True)
        }
        for shape in SHAPES
        if shape in heads[0]
    }


def _median(row: Any, name: str) -> float | None:
    quartiles = getattr(row, name)
    return None if quartiles is None else quartiles.median


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, LoopError, AGAIN)
    except FileNotFoundError as error:
        raise LoopError(f"{path} is missing; {AGAIN}") from error


def read_report(path: Path) -> LoopReport:
    """What `summarise` wrote. LoopError if it cannot be read."""
    try:
        return LoopReport.model_validate(_read(path))
    except ValueError as error:
        raise LoopError(f"{path} is no result of a loop; {AGAIN}") from error


def print_report(report: LoopReport, console: Console) -> None:
    """Print the tables of the three states and of the accept lengths, and one line each for exchange and time."""
    table = Table(title="three states, medians of the repeats", title_justify="left", box=SIMPLE_HEAD)
    for column in ("clients", "state", "tokens/s", "TPOT ms", "accept length"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for row in sorted(report.states, key=lambda one: one["concurrency"]):
        cells = [_number(row["tokens_per_s"], 1), _number(row["tpot_ms"], 1), _number(row["accept_length"], 2)]
        table.add_row(str(row["concurrency"]), NAMES[row["state"]], *cells)
    console.print(table)
    prompts = report.prompts
    title = f"accept length on {prompts['held_out']} held-out prompts (95 % interval)"
    table = Table("drafts", "base head", "trained head", "gain", title=title, title_justify="left", box=SIMPLE_HEAD)
    for shape, one in report.accept_lengths.items():
        change = f"{one['after'].mean / one['before'].mean - 1:+.1%}"
        table.add_row(SHAPES[shape], str(one["before"]), str(one["after"]), change)
    console.print(table)
    lines = [
        f"prompts: {prompts['domain']}; {prompts['asked']} asked, {prompts['recorded']} recorded, "
        f"{prompts['held_out']} held out"
    ]
    if swap := report.swap:
        lines.append(
            f"exchange of the head in {swap['seconds']:.1f} s: {swap['during']} requests ran meanwhile, "
            f"{swap['failed']} of {swap['requests']} failed, {swap['responses_changed']} responses changed"
        )
    wanted = "reached" if report.gain >= report.wanted_gain else "not reached"
    lines += [
        "minutes: " + ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in report.seconds.items()),
        report.verdict,
        f"[bold]accept length {report.accept_length_before:.2f} -> {report.accept_length_after:.2f}, "
        f"{report.gain:+.1%}[/] (wanted {report.wanted_gain:.0%}: {wanted}); "
        f"{report.total_seconds / 60:.0f} minutes in all",
    ]
    for line in lines:
        console.print(line, highlight=False)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
