"""Work is compared at one speed of the processor, whatever its speed was when the work was timed."""

from __future__ import annotations

import random
import statistics

from eagle_plugin.runtime.reference_times import ReferenceTimes

WORK = range(2, 62, 2)  # seconds at full speed
REFERENCE = 3.0  # the same of the reference
PASSES = 4


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
