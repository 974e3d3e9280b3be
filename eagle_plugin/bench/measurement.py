"""Measures servers under each cell's load, keeps what is measured in a file, and compares it repeat by repeat."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from eagle_plugin.bench.cells import Cell, Plan
from eagle_plugin.bench.closed_loop import Phase
from eagle_plugin.bench.load import accept_length
from eagle_plugin.bench.outputs import save
from eagle_plugin.bench.progress import Steps
from eagle_plugin.bench.quartiles import DIGITS, Quartiles, Strict, quartiles, ratio_quartiles
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.request_times import accepted_counts
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.turns import Loaded, Name, Turn, run_load, take_turns, watch_steal

MIB = 2**20


class Measurement(Strict, ABC):
    """One server under one cell's load, once; times are medians over the requests (`request_times`)."""

    repeat: int
    concurrency: int
    temperature: float = 0.0
    prompts: str
    tokens_per_s: float = Field(gt=0, description="output tokens per second while all clients were busy")
    seconds: float = Field(gt=0, description="how long all clients were busy")
    tokens: int = Field(gt=0, description="output tokens in that time")
    requests: int
    requests_per_s: float = Field(gt=0, description="tokens_per_s / mean output tokens of an answer")
    cpu_seconds_per_token: float = Field(default=0.0, ge=0, description="processor time of the server's processes")
    ttft_ms: float
    tpot_ms: float | None
    itl_ms: float | None
    otps: float | None
    accept_length: float | None = Field(
        description="tokens per round, with the bonus token; a plain round counts as one; null without speculation"
    )
    accepted: list[int] = Field(description="rounds, and rounds that accepted 1, 2, ... drafts or more")
    draft_ms: float | None = Field(default=None, description="mean time of the head in a round, if the server tells it")
    drafted_rounds: int = Field(default=0, ge=0, description="rounds that draft_ms is the mean of")
    memory_mib: float = Field(default=0.0, ge=0, description="of the server's processes")
    steal: float | None = Field(description="stolen part of the processor time that was wanted; null if unknown")
    others: float = Field(ge=0, le=1, description="part of the machine that other processes used meanwhile")
    prediction_errors: tuple[int, ...] = Field(
        default=(), description="timed steps by the error of their prediction (policy/prediction_errors.py)"
    )

    @property
    def cell(self) -> Cell:
        """The kind of load."""
        return Cell(self.concurrency, self.temperature, self.prompts)

    @property
    @abstractmethod
    def server(self) -> str:
        """Which server it was; the fields that say so are those of each benchmark."""


One = TypeVar("One", bound=Measurement)


class CellLoad(NamedTuple):
    """One kind of load, and the questions of a repeat of it."""

    cell: Cell
    phase: Phase


class Measured(Strict, Generic[One]):
    """The file of a run that is not finished: what its measurements depend on, and the measurements until now."""

    identity: dict[str, str]
    measurements: list[One] = []


def resume_from(path: Path, identity: dict[str, str], kind: type[Measured[One]]) -> Measured[One]:
    """The measurements in `path`, none if there is no such file; ValueError if they are of other settings."""
    if not path.exists():
        return kind(identity=identity)
    try:
        found = kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a file of measurements"
        raise ValueError(f"--resume: {path} cannot be read ({reason}); remove it to start again") from None
    for name in sorted(identity.keys() | found.identity.keys()):
        before, now = found.identity.get(name), identity.get(name)
        if before != now:
            raise ValueError(
                f"--resume: {path} was measured with {name} {before}, this run has {now}; "
                "use the same options, or leave --resume out to start again"
            )
    return found


def measure_cells(
    servers: Mapping[Name, Server],
    plan: Plan,
    questions: Mapping[str, Sequence[Question]],
    measured: Measured[One],
    make: Callable[[Name, dict[str, Any]], One],
    path: Path,
    steps: Steps,
) -> StealWatch:
    """Add the missing measurements of the plan to `measured`, and write it to `path` after each of them.

    In every repeat of a cell all servers answer the same questions; the next repeat asks other questions, as far as
    there are any. make: the measurement of a server, from its name and the fields that all benchmarks have.

    Raises:
        LoadError, ServerError: a request or a server failed. ValueError: `path` cannot be written.
    """
    known = {(one.repeat, one.cell, one.server) for one in measured.measurements}
    turns = [
        Turn(repeat, place, CellLoad(cell, plan.phase(cell, repeat, questions)), f"repeat {repeat + 1}, {cell}")
        for repeat, place, cell in plan.turns()
    ]
    watch = watch_steal(len(turns) * len(servers), steps)

    def measure(server: Server, load: CellLoad) -> Loaded:
        return run_load(server, [load.phase], load.cell.temperature)

    def is_measured(name: Name, turn: Turn[CellLoad]) -> bool:
        return (turn.repeat, turn.load.cell, name) in known

    with steps.step("measuring") as step:
        for taken in take_turns(servers, turns, measure, watch, step.update, is_measured):
            fields = describe(taken.turn, taken.value, taken.steal, servers[taken.name])
            measured.measurements.append(make(taken.name, fields))
            save(measured, path)
    return watch


def describe(turn: Turn[CellLoad], loaded: Loaded, steal: float | None, server: Server) -> dict[str, Any]:
    """The fields of a `Measurement`.

    Throughputs are of the window in which all clients were busy. Times are of the requests that ended within it, or of
    all where none did.
    """
    (window,) = loaded.windows
    mean_tokens = statistics.fmean(answer.completion_tokens for answer in window.asked)
    return {
        "repeat": turn.repeat,
        **turn.load.cell._asdict(),
        "tokens_per_s": round(window.tokens_per_s, 3),
        "seconds": round(window.seconds, 3),
        "tokens": window.tokens,
        "requests": len(window.asked),
        "requests_per_s": round(window.tokens_per_s / mean_tokens, 4),
        "cpu_seconds_per_token": round(window.cpu_seconds_per_token, 6),
        **{name: rounded(value) for name, value in window.times._asdict().items()},
        "accept_length": rounded(accept_length(window.asked)),
        "accepted": accepted_counts(window.asked),
        "draft_ms": rounded(loaded.drafts.mean_ms, 4),
        "drafted_rounds": loaded.drafts.rounds,
        "memory_mib": round(server.memory_bytes() / MIB, 1),
        "steal": rounded(steal, 4),
        "others": round(loaded.others, 3),
        "prediction_errors": loaded.prediction_errors,
    }


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """The value for a document; None stays None."""
    return None if value is None else round(value, digits)


class Results(Generic[One]):
    """The measurements of a run by cell and server, those of one server in the order of its repeats."""

    def __init__(self, measurements: Sequence[One]) -> None:
        self.cells = list(dict.fromkeys(one.cell for one in measurements))
        self._found: dict[tuple[Cell, str], list[One]] = {(one.cell, one.server): [] for one in measurements}
        for one in sorted(measurements, key=lambda one: one.repeat):
            self._found[one.cell, one.server].append(one)

    def servers(self, cell: Cell) -> list[str]:
        """The servers that were measured in a cell, in the order of their first measurements."""
        return [server for found, server in self._found if found == cell]

    def of(self, cell: Cell, server: str) -> list[One]:
        """What one server did in a cell."""
        return self._found.get((cell, server), [])

    def values(self, cell: Cell, server: str, name: str) -> list[float]:
        """A field of the measurements, by repeat; those that do not have it are left out."""
        found = (getattr(one, name) for one in self.of(cell, server))
        return [value for value in found if value is not None]

    def quartiles(self, cell: Cell, server: str, name: str) -> Quartiles | None:
        """Over the repeats; None where no measurement has the field."""
        values = self.values(cell, server, name)
        return quartiles(values) if values else None

    def medians(self, cell: Cell, name: str, digits: int) -> dict[Any, float]:
        """By server, of those that have the field."""
        found = {server: self.values(cell, server, name) for server in self.servers(cell)}
        return {server: round(statistics.median(values), digits) for server, values in found.items() if values}

    def ratio(self, cell: Cell, ours: str, theirs: str | None, name: str = "tokens_per_s") -> Quartiles | None:
        """Ours over theirs, repeat by repeat; None unless both were measured.

        ValueError if they have different repeats, as an interrupted run has.
        """
        sides = [self.of(cell, server) for server in (ours, theirs or "")]
        if ours == theirs or not all(sides):
            return None
        if [one.repeat for one in sides[0]] != [one.repeat for one in sides[1]]:
            raise ValueError(f"{cell}: {ours} and {theirs} have different repeats; run with --resume")
        numerators, denominators = ([getattr(one, name) for one in side] for side in sides)
        # A processor time can be below the clock tick of the operating system.
        return ratio_quartiles(numerators, denominators) if all(denominators) else None


def mean_steal(measurements: Sequence[Measurement]) -> float | None:
    """Over the measurements of which it is known."""
    known = [one.steal for one in measurements if one.steal is not None]
    return round(statistics.fmean(known), 4) if known else None
