"""The error of predicted times: medians of counted errors against numpy's of the errors themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from eagle_plugin.policy.prediction_errors import BOUNDS, CLASSES, added, class_of, counts_of, cumulated, median_error


def counted(errors: list[float]) -> tuple[int, ...]:
    counts = [0] * CLASSES
    for number, error in enumerate(errors):
        counts[class_of(2.0 * (1 + error if number % 2 else 1 - error), 2.0)] += 1
    return tuple(counts)


@pytest.mark.parametrize("scale", [0.01, 0.05, 0.15, 0.4])
def test_the_median_is_that_of_the_errors_to_the_width_of_a_class(scale: float) -> None:
    """Steps that were too long and too short count alike."""
    draw = random.Random(int(scale * 100))
    errors = [min(abs(draw.gauss(0, scale)), 0.99) for _ in range(2000)]
    found, wanted = median_error(counted(errors)), float(np.median(errors))
    low = max((bound for bound in BOUNDS if bound <= wanted), default=0.0)
    high = min(bound for bound in BOUNDS if bound >= wanted)
    assert low <= found <= high
    assert found == pytest.approx(wanted, rel=0.05, abs=0.001)


def test_few_steps_and_none() -> None:
    assert median_error(()) is None and median_error([0] * CLASSES) is None
    assert median_error(counted([0.035])) == pytest.approx(0.035)
    assert median_error(counted([5.0])) == 1.0  # at least


def test_a_bound_belongs_to_the_class_below_it() -> None:
    assert class_of(1.0, 1.0) == 0 and class_of(1.5, 1.0) == BOUNDS.index(0.5)
    assert class_of(1.5 + 1e-9, 1.0) == BOUNDS.index(0.5) + 1
    assert class_of(9.0, 1.0) == CLASSES - 1


def test_counts_are_subtracted() -> None:
    before, now = counted([0.31] * 9), counted([0.31] * 9 + [0.015] * 5)
    assert added(now, before) == counted([0.015] * 5) and added(before, ()) == before
    assert median_error(added(now, before)) < 0.03 < median_error(now)


def test_the_form_of_prometheus_comes_back() -> None:
    counts = counted([0.005, 0.015, 0.31, 7.0, 0.31])
    steps = cumulated(counts)
    assert list(steps)[:2] == ["0.01", "0.02"] and steps["0.02"] == 2 and steps["+Inf"] == 5
    assert counts_of({label: float(number) for label, number in steps.items()}) == counts
    assert cumulated(()) == {} and counts_of({}) == ()
    with pytest.raises(KeyError):
        counts_of({"0.01": 1.0})
