"""What a `ShapeChooser` counts and reports, against rounds of a known cost."""

from __future__ import annotations

import pytest
import torch

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.costs import CostModel, Costs, Curve, Forward
from eagle_plugin.policy.policy import Policy
from eagle_plugin.policy.report import ShapeTotals
from eagle_plugin.policy.round_times import HostClock
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.policy.survival import typical_sums
from eagle_plugin.runtime.round import Drafts

CAPS = Shape(2, 2, 4)
COSTS = Costs(
    target=Forward(Curve.of([(1, 0.010), (64, 0.0163)])),
    level=Forward(Curve.of([(1, 0.001)])),
    extend=Forward(Curve.of([(1, 0.002)])),
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def chooser(clock: Clock, caps: Shape = CAPS) -> ShapeChooser:
    return ShapeChooser(caps, Policy(caps, CostModel(COSTS)), clock=HostClock(clock))


def serve(shapes: ShapeChooser, clock: Clock, shape: Shape, b: int, kept: list[int], seconds: float) -> None:
    shapes.begin(shape, b, 100 * b)
    clock.now += seconds
    shapes.observe(shapes.launched(shape, b, 100 * b, Drafts.plain(torch.zeros(b, dtype=torch.int64))), kept)


def test_rounds_are_counted_by_shape() -> None:
    shapes, clock = chooser(Clock()), Clock()
    serve(shapes, clock, CAPS, 3, [2, 0, 1], 0.1)
    serve(shapes, clock, CAPS, 2, [1, 1], 0.1)
    serve(shapes, clock, PLAIN, 2, [0, 0], 0.1)
    serve(shapes, clock, PLAIN, 2, [], 0.1)  # all had ended
    assert shapes.totals[CAPS][:3] == (5, 10, 2) and shapes.totals[PLAIN][:3] == (2, 2, 1)


def test_steps_whose_time_is_known() -> None:
    """All but the first of equal steps, and but the one that others follow; each with what was expected before."""
    clock = Clock()
    shapes = chooser(clock)
    first = COSTS.round(CAPS, 1, 100 // 64 * 64 + 64)  # 100 tokens are rounded to 128
    for seconds in (0.5, 0.03, 0.04, 0.7):
        serve(shapes, clock, CAPS, 1, [1], seconds)
    totals = shapes.totals[CAPS]
    assert totals.timed == 2 and totals.seconds == pytest.approx(0.07)
    assert totals.predicted > 2 * first  # the second was expected later than the first had shown what it takes
    shapes.pause()
    serve(shapes, clock, CAPS, 1, [1], 0.03)
    assert shapes.totals[CAPS].timed == 2
    serve(shapes, clock, PLAIN, 1, [0], 0.03)  # another shape is no measure of either
    serve(shapes, clock, CAPS, 1, [0], 0.03)
    assert shapes.totals[CAPS].timed == 3 and shapes.totals[PLAIN].timed == 0


def test_the_report_is_what_the_policy_expects() -> None:
    clock = Clock()
    shapes = chooser(clock)
    assert shapes.report().expected == {} and shapes.report().requests == 0  # no load yet
    assert shapes.policy is not None
    present = shapes.choose(2, 256)
    for _ in range(3):
        serve(shapes, clock, present, 2, [1, 0], 0.05)
    report = shapes.report()
    assert (report.mode, report.caps, report.present) == ("auto", CAPS, present)
    assert (report.requests, report.prefix_tokens) == (2, 256)
    assert report.rates() == pytest.approx(shapes.policy.rates(2, 256)) and set(report.rates()) == set(
        shapes.policy.shapes
    )
    assert report.slowdown > 1.1 and len(report.factors) == CAPS.steps and report.factors[0] != 1.0
    assert report.totals == shapes.totals
    serve(shapes, clock, present, 2, [1, 0], 0.05)
    assert report.totals != shapes.totals  # a report does not change any more


def test_reports_change_no_choice() -> None:
    """The same rounds lead to the same choices, whether somebody asks for reports or not."""

    def choices(asks: bool) -> list[Shape]:
        clock = Clock()
        shapes, found = chooser(clock, Shape(3, 4, 16)), []
        assert shapes.policy is not None
        shapes.policy.observe_sums(shapes.caps, 1, {shape: typical_sums(shape) for shape in shapes.policy.shapes})
        for number in range(200):
            b = 1 + number // 50 * 8
            shape = shapes.choose(b, 100 * b)
            serve(shapes, clock, shape, b, [number % 2 if shape.steps else 0] * b, 0.01 + b * shape.width * 0.001)
            found.append(shape)
            if asks:
                shapes.report()
        return found

    with_reports = choices(True)
    assert with_reports == choices(False) and len(set(with_reports)) > 1


@pytest.mark.parametrize(("shapes", "mode"), [((), "fixed"), ((PLAIN, CAPS), "random")])
def test_without_a_policy_there_are_counts_only(shapes: tuple[Shape, ...], mode: str) -> None:
    served = ShapeChooser(CAPS, None, shapes)
    served.choose(1, 10)
    served.observe(ServedRound(CAPS, 1, 10), [2])
    report = served.report()
    assert report.mode == mode and report.expected == {} and report.factors == ()
    assert report.totals == {CAPS: ShapeTotals(1, 3, 1)}
