"""Describes the result of the benchmark of a trained head, `states.json`: measurements, rows and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.measurement import Measurement, Results
from eagle_plugin.bench.outputs import Report, Settings, StealCount
from eagle_plugin.bench.quartiles import Quartiles, Strict
from eagle_plugin.bench.states.configs import STATES, State, Worker
from eagle_plugin.bench.states.verdict import Finding, Ratio, describe, ratio_with_interval, sentence

FORMAT = 1
MEDIANS = ("ttft_ms", "tpot_ms", "itl_ms", "requests_per_s", "tokens_per_s", "otps", "accept_length")  # of a row
LONG_NAMES: dict[State, str] = {
    "none": "the target without EAGLE",
    "base": "the base head",
    "trained": "the trained head",
}


class StateMeasurement(Measurement):
    """One state under one cell's load, once."""

    state: State

    @property
    def server(self) -> State:
        """The state."""
        return self.state


class Row(Strict):
    """One state in one cell: quartiles over the repeats."""

    state: State
    concurrency: int
    prompts: str
    repeats: int
    requests: int = Field(description="of all repeats")
    ttft_ms: Quartiles
    tpot_ms: Quartiles | None
    itl_ms: Quartiles | None
    requests_per_s: Quartiles
    tokens_per_s: Quartiles
    otps: Quartiles | None
    accept_length: Quartiles | None
    accepted_by_depth: list[float] = Field(description="part of the rounds that accepted 1, 2, ... drafts or more")


class AiperfRow(Strict):
    """What aiperf measured of one state in one cell, with the definitions of `request_times`."""

    state: State
    concurrency: int
    prompts: str
    requests: int
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    requests_per_s: float
    tokens_per_s: float = Field(description="of the whole run, its end with fewer clients included")
    otps: float


class Comparison(Strict):
    """Output tokens per second of one state relative to another."""

    ours: State
    theirs: State
    concurrency: int | None = Field(description="null: the geometric mean over all cells")
    prompts: str | None
    ratio: float
    low: float | None = Field(description="of the 95 % interval over the repeats; null with one repeat")
    high: float | None
    finding: Finding


class HeadFacts(Strict):
    """A head: its name, its kind and what its manifest says of its training."""

    name: str
    config_sha256: str
    weights_sha256: str
    kind: str | None
    training: dict[str, Any] | None


class PromptFacts(Strict):
    """A set of prompts, without their text."""

    questions: int
    sha256: str
    left_out: dict[str, int]


class StatesSettings(Settings):
    """What the results depend on."""

    worker: Worker
    temperature: float
    max_tokens: int = Field(description="mean limit of an answer; limits differ around it")


class StatesReport(Report):
    """`states.json`."""

    format: int = FORMAT
    target: dict[str, str]
    heads: dict[State, HeadFacts]
    verdict: str
    comparisons: list[Comparison]
    rows: list[Row]
    calibration: dict[State, list[float]] = Field(
        description="accepted over predicted tokens by depth, at the end, of each head that a policy served: below 1 "
        "the head is too sure of itself"
    )
    prompts: dict[str, PromptFacts]
    settings: StatesSettings
    steal: StealCount
    command: list[str] = Field(description="the arguments that measure this again; folders by their last name")
    measurements: list[StateMeasurement]
    aiperf: list[AiperfRow] = Field(default=[], description="the first repeat's load by aiperf, where that was asked")


def build_rows(measurements: Sequence[StateMeasurement]) -> list[Row]:
    """One row per cell and state, in the order of the measurement and of `STATES`."""
    results = Results(measurements)
    return [_row(cell, state, results) for cell in results.cells for state in STATES if results.of(cell, state)]


def _row(cell: Cell, state: State, results: Results[StateMeasurement]) -> Row:
    ones = results.of(cell, state)
    known: dict[str, Any] = {name: results.quartiles(cell, state, name) for name in MEDIANS}
    return Row(
        state=state,
        concurrency=cell.concurrency,
        prompts=cell.prompts,
        repeats=len(ones),
        requests=sum(one.requests for one in ones),
        **known,
        accepted_by_depth=accepted_by_depth(ones),
    )


def accepted_by_depth(ones: Sequence[StateMeasurement]) -> list[float]:
    """The part of all rounds of these measurements that accepted 1, 2, ... drafts or more; empty without rounds."""
    longest = max((len(one.accepted) for one in ones), default=0)
    sums = [sum(one.accepted[depth] for one in ones if depth < len(one.accepted)) for depth in range(longest)]
    return [round(count / sums[0], 4) for count in sums[1:]] if sums and sums[0] else []


def compare(measurements: Sequence[StateMeasurement]) -> list[Comparison]:
    """The trained head relative to each other state, over all cells first and then cell by cell.

    Only repeats in which both states were measured in every cell count: then all repeats are of the same mix.
    """
    rates = {(one.state, one.repeat, one.cell): one.tokens_per_s for one in measurements}
    cells = list(dict.fromkeys(one.cell for one in measurements))
    repeats = sorted({one.repeat for one in measurements})
    found: list[Comparison] = []
    for theirs in STATES:
        if theirs == "trained" or not any(one.state == theirs for one in measurements):
            continue
        ratios = {
            (repeat, cell): rates["trained", repeat, cell] / rates[theirs, repeat, cell]
            for repeat in repeats
            for cell in cells
            if ("trained", repeat, cell) in rates and (theirs, repeat, cell) in rates
        }
        whole = [[ratios[repeat, cell] for cell in cells] for repeat in repeats if _complete(ratios, repeat, cells)]
        found.append(_comparison(theirs, None, ratio_with_interval(whole)))
        for cell in cells:
            values = [[ratios[repeat, cell]] for repeat in repeats if (repeat, cell) in ratios]
            found.append(_comparison(theirs, cell, ratio_with_interval(values)))
    return found


def _complete(ratios: Mapping[tuple[int, Cell], float], repeat: int, cells: Sequence[Cell]) -> bool:
    return all((repeat, cell) in ratios for cell in cells)


def _comparison(theirs: State, cell: Cell | None, ratio: Ratio) -> Comparison:
    ratio = Ratio(*(None if value is None else round(value, 4) for value in ratio))  # type: ignore[arg-type]
    return Comparison(
        ours="trained",
        theirs=theirs,
        concurrency=cell.concurrency if cell else None,
        prompts=cell.prompts if cell else None,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        finding=ratio.finding,
    )


def verdict(comparisons: Sequence[Comparison], measurements: Sequence[StateMeasurement], engine: str) -> str:
    """The comparisons over all cells as one sentence, that with the base head first."""
    whole = {one.theirs: one for one in comparisons if one.concurrency is None}
    clauses = [
        describe(Ratio(one.ratio, one.low, one.high), LONG_NAMES["trained"], LONG_NAMES[theirs])
        for theirs in ("base", "none")
        if (one := whole.get(theirs)) is not None
    ]
    clients = ", ".join(str(count) for count in sorted({one.concurrency for one in measurements}))
    sets = ", ".join(dict.fromkeys(one.prompts for one in measurements))
    repeats = len({one.repeat for one in measurements})
    return sentence(
        clauses, f"in {engine}, at concurrency {clients}, on the sets of prompts {sets}, over {count_repeats(repeats)}"
    )


def count_repeats(repeats: int) -> str:
    """The number with its noun: "1 repeat" or "2 repeats"."""
    return "1 repeat" if repeats == 1 else f"{repeats} repeats"
