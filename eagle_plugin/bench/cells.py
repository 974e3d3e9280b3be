"""Plans which cells are measured: numbers of clients, temperatures, prompts and repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eagle_plugin.bench.closed_loop import Phase
from eagle_plugin.bench.prompt_kinds import PromptKind, select_asks, tokens_per_request
from eagle_plugin.bench.questions import Question

CONCURRENCIES = (1, 2, 4, 8, 16, 32)
REPEATS = 4
EXTRA_REPEATS = 3  # of the cells beside the main ones


class Cell(NamedTuple):
    """One kind of load."""

    concurrency: int
    temperature: float
    prompts: str  # a kind of prompts, or the name of a set

    def __str__(self) -> str:
        clients = "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"
        return f"{clients}, T {self.temperature:g}, {self.prompts} prompts"


@dataclass(frozen=True)
class Plan:
    """The cells with their repeats, and how long answers are."""

    repeats: dict[Cell, int]
    length: float = 1.0  # part of the usual answer length
    answer_tokens: int | None = None  # mean limit of an answer; None: by the cell

    def turns(self) -> Iterator[tuple[int, int, Cell]]:
        """Every (repeat, number of the cell, cell): all cells once, then all again, so that each has a slow hour."""
        for repeat in range(max(self.repeats.values())):
            for place, (cell, repeats) in enumerate(self.repeats.items()):
                if repeat < repeats:
                    yield repeat, place, cell

    def phase(self, cell: Cell, repeat: int, questions: Mapping[str, Sequence[Question]]) -> Phase:
        """The clients of a cell and the questions of a repeat, by kind or set of prompts."""
        count = requests_of(cell.concurrency, cell.prompts)
        asks = select_asks(questions[cell.prompts], repeat * count, count, self.max_tokens(cell))
        return Phase(cell.concurrency, asks)

    @property
    def max_concurrency(self) -> int:
        """The most clients of any cell."""
        return max(cell.concurrency for cell in self.repeats)

    def max_tokens(self, cell: Cell) -> int:
        """Mean limit of an answer's tokens, chosen so that most cells take about ten seconds on two cores."""
        if self.answer_tokens is not None:
            return self.answer_tokens
        usual = 64 if cell.concurrency <= 4 else 48 if cell.concurrency <= 16 else 32
        # The prefill of a long prompt takes as long as some 80 decode steps.
        return max(4, round(self.length * (96 if cell.prompts == "long" else usual)))

    def cache_tokens(self) -> int:
        """Cache slots with which no request of any cell has to wait for others."""
        return max(cell.concurrency * tokens_per_request(cell.prompts, self.max_tokens(cell)) for cell in self.repeats)


def requests_of(clients: int, prompts: str = "mixed") -> int:
    """Questions of one measurement: three per client for few clients and for long prompts, two for many; six at least.

    When a client finds no further question, the others have begun answers whose prompts were computed and whose tokens
    have not all arrived: the longer the prompts, the more that weighs.
    """
    return 3 * clients if prompts == "long" else max(2 * clients, min(3 * clients, 12), 6)


def make_plan(
    concurrencies: Sequence[int] | None = None,
    temperatures: Sequence[float] | None = None,
    prompts: Sequence[PromptKind] | None = None,
    repeats: int | None = None,
    quick: bool = False,
) -> Plan:
    """The default cells, or every combination of what is named.

    By default every number of clients has mixed prompts at temperature 0, and a few numbers have temperature 0.7 or
    long prompts; `concurrencies` alone keeps those of the default cells.
    """
    counts = tuple(concurrencies or ((1, 4, 16) if quick else CONCURRENCIES))
    main = 2 if quick else REPEATS
    if temperatures or prompts:
        cells = {
            Cell(count, temperature, kind): main
            for kind in prompts or ("mixed",)
            for temperature in temperatures or (0.0,)
            for count in counts
        }
    else:
        extra = 1 if quick else EXTRA_REPEATS
        warm, long = ((4,), (1,)) if quick else ((1, 8, 32), (1, 4))
        cells = {Cell(count, 0.0, "mixed"): main for count in counts}
        cells |= {Cell(count, 0.7, "mixed"): extra for count in counts if count in warm}
        cells |= {Cell(count, 0.0, "long"): extra for count in counts if count in long}
    return Plan({cell: repeats or usual for cell, usual in cells.items()}, 0.5 if quick else 1.0)
