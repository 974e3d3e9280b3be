"""Work is compared at one speed of the processor, whatever its speed was when the work was timed."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_plugin.runtime import round_costs
from eagle_plugin.runtime.round_costs import (
    PASSES,
    ReferenceTimes,
    is_much_faster,
    measure,
    per_key_and_row,
    run_first,
    sizes_to_measure,
    slope,
)

WORK = range(2, 62, 2)  # seconds at full speed
REFERENCE = 3.0  # the same of the reference


class Processor:
    """It is slower by 1.6 for some 30 runs, then as fast as before, because others share it; few runs are disturbed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._slowdown = 1.6

    def run(self, work: float) -> float:
        if self._rng.random() < 1 / 30:
            self._slowdown = 2.6 - self._slowdown
        disturbed = 3.0 if self._rng.random() < 0.01 else 1.0
        return work * self._slowdown * disturbed


def wrong(times: list[float]) -> int:
    """How many of the times are off by more than a tenth against the others."""
    speed = statistics.median(seconds / work for seconds, work in zip(times, WORK, strict=True))
    return sum(abs(seconds / work / speed - 1) > 0.1 for seconds, work in zip(times, WORK, strict=True))


def times_against_a_reference(seed: int) -> list[float]:
    processor = Processor(seed)
    timed: ReferenceTimes[int] = ReferenceTimes(lambda: processor.run(REFERENCE))
    for _ in range(PASSES):
        for work in WORK:
            timed.add(work, processor.run(work))
    assert list(timed.cells) == list(WORK)
    return list(timed.times().values())


def shortest_times(seed: int) -> list[float]:
    processor = Processor(seed)
    passes = [[processor.run(work) for work in WORK] for _ in range(PASSES)]
    return [min(runs) for runs in zip(*passes, strict=True)]


def test_the_speed_of_the_moment_does_not_count() -> None:
    """The control, the shortest of as many runs, is wrong where no run was made at full speed."""
    found = [wrong(times_against_a_reference(seed)) for seed in range(30)]
    control = [wrong(shortest_times(seed)) for seed in range(30)]
    assert sum(found) < 0.04 * len(WORK) * 30, found
    assert sum(control) > 0.06 * len(WORK) * 30, control


def test_times_are_those_of_the_fastest_moment() -> None:
    speeds = iter([2.0, 4.0, 3.0, 1.5])
    timed: ReferenceTimes[str] = ReferenceTimes(lambda: next(speeds))
    for seconds in (30.0, 35.0, 22.5):
        timed.add("work", seconds)
    assert timed.times() == {"work": 1.5 * 10.0}


class Rounds:
    """Cells that take as many seconds as their number says, on a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, list[int]()
        monkeypatch.setattr(round_costs, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def measured(self, cells: list[int], needed: int, budget: float, in_any_rank: Any = bool) -> dict[int, float]:
        def run(cell: int) -> Generator[dict[int, float], None, None]:
            self.now += cell
            self.ran.append(cell)
            yield {cell: float(cell)}

        timed: ReferenceTimes[int] = ReferenceTimes(lambda: 1.0)
        return measure(timed, cells, run, lambda cell: cell <= needed, in_any_rank, budget, int)


def test_a_spent_budget_leaves_out_what_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    assert rounds.measured([1, 2, 3], needed=1, budget=2.5) == {1: 1.0, 2: 2.0}
    assert rounds.ran == [1, 2, 1, 1, 1]  # a median of four runs, whatever they cost
    again = Rounds(monkeypatch)
    assert set(again.measured([1, 2, 3], needed=1, budget=100)) == {1, 2, 3} and again.ran == [1, 2, 3] * 4


def test_all_ranks_leave_out_what_one_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Late; enough memory for the cell, the reference and the end of the cell; late.
    answers = iter([True, False, False, False, True] * PASSES)
    measured = Rounds(monkeypatch).measured([1, 2], needed=1, budget=100, in_any_rank=lambda mine: next(answers))
    assert set(measured) == {1} and not list(answers)


def test_a_size_without_memory_in_any_rank_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of it, or of a larger one, before the memory ran out does not count either."""
    rounds = Rounds(monkeypatch)
    answers = iter([False] * (4 * 3 + 4 + 1) + [True] + [False] * 100)  # in the second pass, a rank cannot run 2
    measured = rounds.measured([1, 2, 3], needed=1, budget=100, in_any_rank=lambda mine: next(answers))
    assert measured == {1: 1.0} and rounds.ran == [1, 2, 3, 1, 2, 1, 1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: out of memory")])
def test_a_size_that_runs_out_of_memory_is_no_end(error: RuntimeError) -> None:
    def run(cell: int) -> Generator[dict[tuple[int, str], float], None, None]:
        yield {(cell, "first"): 1.0}
        if cell > most:
            raise error
        yield {(cell, "second"): 1.0}

    most, timed = 2, ReferenceTimes[tuple[int, str]](lambda: 1.0)
    assert set(measure(timed, [1, 4, 2, 8], run, bool, bool, 100.0, int)) == {
        (cell, name) for cell in (1, 2) for name in ("first", "second")
    }
    most = 0
    with pytest.raises(torch.OutOfMemoryError, match="the smallest round"):
        measure(timed, [1, 2], run, bool, bool, 100.0, int)


class Ranks:
    """Two ranks, each in a thread, which find out together whether a flag is set in any, or that one has gone away."""

    def __init__(self) -> None:
        self._meeting, self._flags = threading.Barrier(2, timeout=20), [False, False]

    def any_of(self, rank: int) -> Callable[[bool], bool]:
        def in_any_rank(mine: bool) -> bool:
            self._flags[rank] = mine
            self._meeting.wait()
            found = any(self._flags)
            self._meeting.wait()
            return found

        return in_any_rank

    def forward(self) -> float:
        """One with a collective: both ranks must be in it."""
        self._meeting.wait()
        return 1.0


@pytest.mark.parametrize("fails_in", ["the cell", "the reference"])
def test_no_rank_runs_a_forward_while_another_has_no_memory(fails_in: str) -> None:
    """Else it would wait there for the other one, which asks in vain whether to go on."""
    ranks, closed = Ranks(), list[int]()

    def measured(rank: int) -> dict[tuple[int, str], float]:
        forwards = list[str]()

        def reference() -> float:
            seconds = ranks.forward()
            forwards.append("reference")
            if rank == 1 and fails_in == "the reference" and forwards[-2:] == ["first of 4", "reference"]:
                raise torch.OutOfMemoryError("no memory")
            return seconds

        def run(cell: int) -> Generator[dict[tuple[int, str], float], None, None]:
            try:
                for part in ("first", "second"):
                    forwards.append(f"{part} of {cell}")
                    seconds = ranks.forward()
                    if rank == 1 and fails_in == "the cell" and forwards[-1] == "second of 4":
                        raise torch.OutOfMemoryError("no memory")
                    yield {(cell, part): seconds}
            finally:
                closed.append(cell)

        return measure(ReferenceTimes(reference), [1, 2, 4], run, bool, ranks.any_of(rank), 100.0, int)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(measured, range(2))
    assert first == second == {(cell, part): 1.0 for cell in (1, 2) for part in ("first", "second")}
    assert sorted(closed) == [1] * 2 * PASSES + [2] * 2 * PASSES + [4] * 2


def test_the_first_runs_end_in_all_ranks_alike() -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: out of memory")

    run_first(lambda: None, bool)
    for call, in_any_rank in ((fails, bool), (lambda: None, lambda mine: True)):
        with pytest.raises(torch.OutOfMemoryError, match="the smallest round"):
            run_first(call, in_any_rank)


def test_another_error_is_no_lack_of_memory() -> None:
    def run(cell: int) -> Generator[dict[int, float], None, None]:
        raise RuntimeError("another")

    with pytest.raises(RuntimeError, match="another"):
        measure(ReferenceTimes[int](lambda: 1.0), [1], run, bool, bool, 100.0, int)


def test_sizes_to_measure() -> None:
    assert sizes_to_measure([48, 40, 32, 24, 16, 12, 8, 4, 2, 1]) == [1, 2, 4, 8, 16, 32, 48]
    assert sizes_to_measure([12]) == [12] and sizes_to_measure([24, 12, 20]) == [12, 24]


def test_costs_of_a_busy_machine_are_recognised_by_any_of_its_runs() -> None:
    ran = list[str]()

    def run(name: str, seconds: float) -> float:
        ran.append(name)
        return seconds

    runs = [(kept, partial(run, str(kept), 1.0)) for kept in (1.4, 1.6)]
    assert not is_much_faster(runs[:1]) and is_much_faster(runs) and not is_much_faster([])
    assert ran.count("1.6") == ran.count("1.4") / 2 == PASSES  # the ranks run the same


def test_slopes_are_split_into_those_of_a_row_and_of_none() -> None:
    keys, rows = 50, 9
    slopes = [slope(2.0 + keys * (0.3 + 0.01 * n), 2.0, keys) for n in (1, rows)]
    assert per_key_and_row(*slopes, rows) == (pytest.approx(0.3), pytest.approx(0.01))
    assert slope(1.0, 2.0, keys) == 0.0 and per_key_and_row(0.2, 0.1, rows) == (0.2, 0.0)
