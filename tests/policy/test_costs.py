"""Costs of a round: interpolation against numpy, the sum of its parts, and what served rounds correct."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.costs import (
    DEFERRED_TOKENS,
    PHASES,
    SPEED_ROUNDS,
    CostModel,
    Costs,
    Curve,
    Forward,
    size_class,
)

prop = settings(derandomize=True, deadline=None, max_examples=100, database=None)
A, B, C = Shape(2, 4, 8), Shape(4, 4, 16), Shape.chain(3)
COSTS = Costs(
    target=Forward(Curve.of([(1, 10.0), (8, 11.0), (64, 25.0), (512, 100.0)]), per_key=1e-4, per_key_and_row=1e-5),
    level=Forward(Curve.of([(1, 1.0), (64, 2.0)]), per_key=1e-6),
    extend=Forward(Curve.of([(1, 1.5), (64, 3.0)])),
    fixed=0.5,
    draft=0.25,
)


@prop
@given(st.dictionaries(st.integers(1, 4096), st.floats(1e-4, 10.0), min_size=1, max_size=8), st.integers(1, 8192))
def test_a_curve_is_linear_between_its_points(points: dict[int, float], rows: int) -> None:
    """Between the shortest times of so many rows or more."""
    curve, last = Curve.of(points.items()), max(points)
    ordered = sorted(points)
    least = [min(points[more] for more in ordered if more >= n) for n in ordered]
    found = curve.at(rows)
    if rows <= last:
        assert found == pytest.approx(np.interp(rows, ordered, least))
    else:
        assert found > points[last]  # more rows are never free, whatever the noise of the last two points


@pytest.mark.parametrize("shape", [PLAIN, A, B, C])
def test_the_phases_are_the_parts_of_a_round(shape: Shape) -> None:
    model = CostModel(COSTS)
    for _ in range(50):
        model.observe(shape, 4, 800, 1.5 * COSTS.round(shape, 4, 800))
    found = model.phases(shape, 4, 800)
    assert tuple(found) == PHASES and sum(found.values()) == pytest.approx(model.seconds((shape,), 4, 800)[shape])
    uncorrected = CostModel(COSTS).phases(shape, 4, 800)
    assert uncorrected["fixed"] == pytest.approx(0.5)
    assert uncorrected["verify"] == pytest.approx(COSTS.target.seconds(4, shape.width, 800))
    levels = max(shape.steps - 1, 0) * COSTS.level.seconds(4, shape.topk, 800)
    assert uncorrected["draft"] == pytest.approx(levels + (0.25 if shape != PLAIN else 0.0))
    assert all(found[name] == pytest.approx(1.5 * part, rel=0.01) for name, part in uncorrected.items())


def test_the_head_reads_what_it_missed_in_forwards_of_32_tokens() -> None:
    model = CostModel(COSTS)
    whole, rest = COSTS.extend.seconds(4, DEFERRED_TOKENS, 100), COSTS.extend.seconds(4, 5, 100)
    assert model.catch_up(4, 100, 2 * DEFERRED_TOKENS + 5) == pytest.approx(2 * whole + rest)
    assert model.catch_up(4, 100, DEFERRED_TOKENS) == pytest.approx(whole) and model.catch_up(4, 100, 0) == 0
    for _ in range(100):
        model.observe(A, 4, 100, 2 * COSTS.round(A, 4, 100))
    assert model.catch_up(4, 100, 5) == pytest.approx(2 * rest, rel=0.01)


def test_a_plain_round_has_its_share_of_what_the_head_reads_of_plain_rounds() -> None:
    model = CostModel(COSTS)
    without = model.seconds((PLAIN, A), 4, 100)
    model.most_deferred = 10
    found = model.seconds((PLAIN, A), 4, 100)
    assert found == {PLAIN: pytest.approx(without[PLAIN] + model.catch_up(4, 100, 10) / 10), A: without[A]}
    assert model.seconds((A,), 4, 100) == {A: without[A]}


def test_a_curve_goes_on_as_its_last_two_points() -> None:
    assert Curve.of([(1, 1.0), (4, 4.0), (8, 6.0)]).at(16) == pytest.approx(10.0)
    assert Curve.of([(4, 2.0)]).at(8) == pytest.approx(4.0)
    assert Curve.of([(4, 2.0)]).at(1) == 2.0


def test_of_equal_rows_the_shortest_time_counts() -> None:
    assert Curve.of([(8, 3.0), (1, 1.0), (8, 2.0), (8, 5.0)]) == Curve((1, 8), (1.0, 2.0))


@pytest.mark.parametrize("shape", [PLAIN, A, B, C])
@pytest.mark.parametrize(("b", "keys"), [(1, 0), (1, 4000), (16, 16 * 512)])
def test_a_round_is_the_sum_of_its_parts(shape: Shape, b: int, keys: int) -> None:
    steps, topk, width = shape
    wanted = COSTS.fixed + COSTS.target.seconds(b, width, keys)
    if shape != PLAIN:  # else the head reads the round's tokens later, or never
        wanted += COSTS.extend.seconds(b, shape.max_accept_length, keys) + COSTS.draft
    for _ in range(1, steps):  # the first level was proposed by the extend of the round before
        wanted += COSTS.level.seconds(b, topk, keys)
    assert COSTS.round(shape, b, keys) == pytest.approx(wanted)
    assert CostModel(COSTS).seconds([shape], b, keys) == {shape: pytest.approx(wanted)}


@pytest.mark.parametrize("shape", [PLAIN, A, B, C, Shape(1, 4, 5), Shape(16, 4, 64)])
def test_of_a_parallel_head_one_forward_drafts_all_levels(shape: Shape) -> None:
    """Of steps - 1 rows per request, whatever the children per node."""
    b, keys = 4, 1000
    costs = COSTS._replace(levels=Levels.PARALLEL)
    wanted = COSTS.round(shape, b, keys)
    if shape.steps > 1:
        wanted -= (shape.steps - 1) * COSTS.level.seconds(b, shape.topk, keys)
        wanted += COSTS.level.seconds(b, shape.steps - 1, keys)
    assert costs.round(shape, b, keys) == pytest.approx(wanted)


def test_keys_cost_by_request_and_by_row() -> None:
    forward = Forward(Curve.of([(1, 1.0)]), per_key=0.25, per_key_and_row=0.5)
    assert forward.seconds(1, 3, 10) == pytest.approx(3 + 10 * 0.25 + 10 * 3 * 0.5)


def serve(
    model: CostModel, shape: Shape, n: int, seconds: float, b: int = 4, noise: float = 0.0, seed: int = 0
) -> None:
    """n rounds that take `seconds` times what the tables say."""
    gen = random.Random(seed)
    for _ in range(n):
        model.observe(shape, b, 400, COSTS.round(shape, b, 400) * seconds * math.exp(gen.gauss(0, noise)))


def ratios(model: CostModel, b: int = 4) -> dict[Shape, float]:
    """What the model predicts, in what the tables say."""
    return {shape: seconds / COSTS.round(shape, b, 400) for shape, seconds in model.seconds((A, B, C), b, 400).items()}


def test_a_slower_machine_changes_all_shapes_alike() -> None:
    model = CostModel(COSTS)
    serve(model, A, 100, 1.5)
    assert list(ratios(model).values()) == pytest.approx([1.5] * 3, rel=0.01)


def test_a_shape_that_is_slower_than_its_table_is_found_by_changes() -> None:
    """Also when the machine becomes slower at the same time; no other shape is blamed."""
    model = CostModel(COSTS)
    for _ in range(20):
        for shape, seconds in ((A, 1.0), (B, 1.5)):
            serve(model, shape, SPEED_ROUNDS, seconds * 1.3, noise=0.05)
    found = ratios(model)
    assert found[B] / found[A] == pytest.approx(1.5, rel=0.05)
    assert found[A] < found[C] < found[B]  # nothing is known of it
    assert found[A] == pytest.approx(1.3, rel=0.1)


def test_few_changes_are_enough() -> None:
    """After one most of it is blamed on the shape, not on the machine; after three, what it is."""
    model = CostModel(COSTS)
    serve(model, A, 50, 1.0)
    serve(model, B, SPEED_ROUNDS, 1.5)
    found = ratios(model)
    assert found[B] == pytest.approx(1.5, rel=0.05) and 1.0 < found[A] < 1.15
    serve(model, A, SPEED_ROUNDS, 1.0)
    serve(model, B, SPEED_ROUNDS, 1.5)
    found = ratios(model)
    assert found[B] / found[A] == pytest.approx(1.5, rel=0.05)


def test_a_machine_that_slows_down_at_a_change_costs_no_shape_anything_after_the_next_ones() -> None:
    model = CostModel(COSTS)
    serve(model, A, 50, 1.0)
    serve(model, B, 50, 2.0)
    blamed = ratios(model)
    assert blamed[B] / blamed[A] > 1.5  # the control: at first B is blamed
    for shape in (A, B, A, B, A):
        serve(model, shape, SPEED_ROUNDS, 2.0)
    found = ratios(model)
    assert found[B] / found[A] == pytest.approx(1.0, rel=0.1)


def test_what_was_learned_of_a_shape_fades() -> None:
    model = CostModel(COSTS)
    serve(model, A, 50, 1.0)
    serve(model, B, 50, 2.0)
    serve(model, C, 5000, 1.0)
    found = ratios(model)
    assert found[B] / found[C] == pytest.approx(1.0, rel=0.02)


def test_errors_are_of_one_size_of_the_batch() -> None:
    model = CostModel(COSTS)
    serve(model, A, 50, 1.0)
    serve(model, B, 50, 1.5)
    found = ratios(model, b=64)
    assert found[A] == pytest.approx(found[B])


def test_what_changes_with_the_size_of_the_batch_is_blamed_on_no_shape() -> None:
    """The tables can be wrong about sizes; also if the shape changes at once, or soon after the size."""
    model = CostModel(COSTS)
    serve(model, A, 50, 1.6, b=1)
    serve(model, B, 2, 1.0, b=8)
    serve(model, C, 50, 1.0, b=8)
    found = ratios(model, b=8)
    assert [found[A], found[B], found[C]] == pytest.approx([1.0] * 3, rel=0.01)
    serve(model, B, 2, 1.3, b=8)  # the control: now the speed at this size is known
    assert ratios(model, b=8)[B] > 1.1


def test_powers_of_two_are_in_the_middle_of_their_size_class() -> None:
    classes = [size_class(b) for b in range(1, 1025)]
    assert classes == sorted(classes)
    for power in range(11):
        assert classes[2**power - 1] == power
    assert [size_class(b) for b in (5, 6, 7, 9, 11, 12)] == [2, 3, 3, 3, 3, 4]


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf, math.inf, math.nan])
def test_a_clock_that_was_set_counts_for_nothing(seconds: float) -> None:
    model = CostModel(COSTS)
    serve(model, A, 50, 1.2)
    before = ratios(model)
    for shape in (A, B, A, B, A):
        model.observe(shape, 4, 400, seconds)
    assert ratios(model) == before


@pytest.mark.parametrize("seconds", [1e-300, 1e9])
def test_one_absurd_time_changes_little(seconds: float) -> None:
    model = CostModel(COSTS)
    serve(model, A, 50, 1.0)
    model.observe(A, 4, 400, seconds)
    assert list(ratios(model).values()) == pytest.approx([1.0] * 3, rel=0.25)
    serve(model, A, 50, 1.0)
    assert list(ratios(model).values()) == pytest.approx([1.0] * 3, rel=0.001)
    model.observe(B, 4, 400, seconds)
    assert list(ratios(model).values()) == pytest.approx([1.0] * 3, rel=0.25)
    serve(model, B, 50, 1.0)
    assert list(ratios(model).values()) == pytest.approx([1.0] * 3, rel=0.04)


def test_noise_of_times_is_averaged() -> None:
    model = CostModel(COSTS)
    worst = 0.0
    for turn in range(200):
        serve(model, (A, B)[turn % 2], 10, 1.0, noise=0.1, seed=turn)
        found = ratios(model)
        worst = max(worst, abs(math.log(found[B] / found[A])))
    assert 0.01 < worst < 0.2
