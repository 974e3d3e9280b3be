"""Measures the parts of a round, which an adapter runs: in passes over all sizes, each time against a reference.

Several passes: what disturbs one hardly disturbs the same size of the next. Processors change their speed by a third
within seconds, so that every time counts as a multiple of what a small forward took just before and after it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import torch

from eagle_plugin.common.device_memory import is_out_of_memory
from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.costs import Costs, Curve, Forward

PASSES = 4
SHORTEST = 1e-6  # seconds, where noise hides what a level takes
MUCH_FASTER = 1.5  # a round now, over the one that kept costs tell: the machine was busy when they were measured
NO_MEMORY = (
    "there is no memory for the smallest round whose costs are measured: leave more of the device's memory free "
    "(--mem-fraction-static in SGLang, --gpu-memory-utilization in vLLM)"
)

Key = TypeVar("Key", bound=Hashable)
Cell = TypeVar("Cell", bound=Hashable)
Result = TypeVar("Result")


Round = tuple[int, Shape, int]  # requests, shape, tokens of each prefix


class Phases(NamedTuple):
    """Seconds of the phases of one round."""

    draft: float
    target: float  # the target's forward and the walk
    extend: float


class ReferenceTimes(Generic[Key]):
    """Times of forwards by what they are, each as a multiple of what a reference took just before and after it."""

    def __init__(self, reference: Callable[[], float]) -> None:
        """reference: runs and times the same forward each time, in seconds."""
        self._reference = reference
        self._last = self._fastest = reference()
        self._multiples: dict[Key, list[float]] = {}

    @property
    def cells(self) -> Collection[Key]:
        """Those that have a time."""
        return self._multiples.keys()

    def add(self, cell: Key, seconds: float) -> None:
        """One run of a forward, which has just ended."""
        self.add_all({cell: seconds})

    def add_all(self, parts: Mapping[Key, float]) -> None:
        """One run of several forwards, which have just ended."""
        before, self._last = self._last, self._reference()
        self._fastest = min(self._fastest, self._last)
        for cell, seconds in parts.items():
            self._multiples.setdefault(cell, []).append(2 * seconds / (before + self._last))

    def forget(self, cells: Iterable[Key]) -> None:
        """Leave out the times of these forwards."""
        for cell in cells:
            self._multiples.pop(cell, None)

    def times(self) -> dict[Key, float]:
        """Seconds of each forward while the reference is fastest: of several runs the median."""
        return {cell: self._fastest * statistics.median(found) for cell, found in self._multiples.items()}


def measure(
    timed: ReferenceTimes[Key],
    cells: Sequence[Cell],
    run: Callable[[Cell], Generator[Mapping[Key, float], None, None]],
    is_needed: Callable[[Cell], bool],
    in_any_rank: Callable[[bool], bool],
    budget: float,
    size_of: Callable[[Cell], int],
) -> dict[Key, float]:
    """Seconds of the parts of all cells, in each of `PASSES` passes.

    run(cell) gives the seconds of the parts that have just run, and may go on after the reference has run.
    in_any_rank: whether a flag is set in any rank; all ranks run the same cells, and each gives its parts in the same
    order. budget: seconds, after which cells that are not needed are left out. size_of: where a cell runs out of memory
    in any rank, no cell of its size or a larger one has a time.

    Raises:
        torch.OutOfMemoryError: for the smallest cell; nothing is left to measure.
    """
    end, too_large = time.perf_counter() + budget, math.inf
    ran: dict[Cell, set[Key]] = {cell: set() for cell in cells}
    for _ in range(PASSES):
        for cell in cells:
            is_late = in_any_rank(time.perf_counter() > end)
            if size_of(cell) >= too_large or (is_late and not is_needed(cell)):
                continue
            with closing(run(cell)) as parts:
                has_room = _run(timed, parts, ran[cell], in_any_rank)
            if not has_room:
                too_large = size_of(cell)
                if too_large == min(map(size_of, cells)):
                    raise torch.OutOfMemoryError(NO_MEMORY)
                for other in cells:
                    if size_of(other) >= too_large:
                        timed.forget(ran[other])
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
    return timed.times()


def run_first(call: Callable[[], object], in_any_rank: Callable[[bool], bool]) -> None:
    """Run what is allocated, read or compiled at the first time, before anything is measured.

    Raises:
        torch.OutOfMemoryError: in all ranks, if one of them has no memory for it.
    """
    if in_any_rank(not has_room(call)):
        raise torch.OutOfMemoryError(NO_MEMORY)


def _run(
    timed: ReferenceTimes[Key],
    parts: Iterator[Mapping[Key, float]],
    ran: set[Key],
    in_any_rank: Callable[[bool], bool],
) -> bool:
    """Run the parts of a cell, and the reference after each; whether all ranks had memory for all of it.

    The reference is a forward in which the ranks wait for each other, in vain for one that ran out of memory just
    before: each forward begins when all ranks had memory for the one before it.
    """

    def is_in_all(call: Callable[[], object]) -> bool:
        return not in_any_rank(not has_room(call))

    part: list[Mapping[Key, float]] = []
    while is_in_all(lambda: part.extend(islice(parts, 1))):
        if not part:
            return True
        ran.update(part[0])
        if not is_in_all(partial(timed.add_all, part.pop())):
            break
    return False


def has_room(call: Callable[[], object]) -> bool:
    """Whether a call does not run out of memory."""
    try:
        call()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def sizes_to_measure(captured: Sequence[int]) -> list[int]:
    """Of the captured batch sizes the smallest, the powers of two and the largest, ascending.

    The costs of the sizes between are interpolated.
    """
    ends = min(captured), max(captured)
    return sorted(size for size in captured if size in ends or size & (size - 1) == 0)


def timed_call(call: Callable[[], Result], of_thread: bool = False) -> tuple[float, Result]:
    """Seconds of a call to its end on the device, and what it returns; of_thread: only those that this thread ran."""
    clock = time.thread_time if of_thread else time.perf_counter
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    begin = clock()
    result = call()
    wait()
    return clock() - begin, result


def is_much_faster(runs: Sequence[tuple[float, Callable[[], float]]]) -> bool:
    """Whether one of these runs now takes so much less than its kept seconds that the machine was busy then.

    All of them run, whatever they show: the ranks run the same forwards.
    """
    found = [min(run() for _ in range(PASSES)) for _, run in runs]
    return any(now * MUCH_FASTER < kept for (kept, _), now in zip(runs, found, strict=True))


def costs_of(rounds: Mapping[Round, Phases], levels: Levels) -> Costs:
    """The costs of rounds from those of some shapes and batch sizes, over prefixes of one length.

    What a draft takes without a forward of the head, of one level if it has one, counts apart; so some round must have
    no more levels. Where none has, all of it counts for the levels.
    """
    target, level, extend = [], [], []
    first: dict[int, float] = {}  # by requests: of a draft without a forward
    for (b, shape, _), phases in rounds.items():
        if shape != PLAIN and shape.steps == levels.without_forward:
            first[b] = min(phases.draft, first.get(b, phases.draft))
    for (b, shape, _), phases in rounds.items():
        target.append((b * shape.width, phases.target))
        if shape != PLAIN:
            extend.append((b * shape.max_accept_length, phases.extend))
        if shape.steps > levels.without_forward:
            rows, forwards = levels.forwards(shape)
            level.append((b * rows, max(phases.draft - first.get(b, 0.0), SHORTEST) / forwards))
    return Costs(
        Forward(Curve.of(target)),
        Forward(Curve.of(level or extend)),
        Forward(Curve.of(extend)),
        levels=levels,
        draft=min(first.values(), default=0.0),
    )


def slope(long: float, short: float, prefix_tokens: int) -> float:
    """Seconds per token of the prefixes, from two times whose prefixes differ by so many tokens in all."""
    return max(long - short, 0.0) / prefix_tokens


def per_key_and_row(one_row: float, all_rows: float, rows: int) -> tuple[float, float]:
    """Of a `Forward`, from its slopes with one row per request and with so many: seconds per token, and per row too."""
    per_row = max(all_rows - one_row, 0.0) / max(rows - 1, 1)
    return max(one_row - per_row, 0.0), per_row
