"""The policy where rounds take other times than its tables say: slow machines, wrong tables, and clocks that jump."""

from __future__ import annotations

import math
import random
from itertools import accumulate, product

import pytest
from policy_world import CAPS, HIGH, MIDDLE, World, compare_nothing, device, new_policy

from eagle_plugin.core.shape import PLAIN, Shape


@pytest.mark.parametrize("slow_of", ["all", "present", "drafting"])
def test_rounds_that_take_ten_times_as_long_for_a_while(slow_of: str) -> None:
    """Of all shapes, of the one that is served, or of all that draft: afterwards the choice is right again."""
    policy, world = new_policy(device(64)), World(device(64), HIGH, noise=0.03)
    world.serve(policy, 8, 500)
    best = policy.present
    is_slow = {"all": lambda s: True, "present": lambda s: s == best, "drafting": lambda s: s != PLAIN}[slow_of]
    world.slower = lambda shape, n: 10.0 if is_slow(shape) else 1.0
    world.serve(policy, 8, 300)
    world.slower = lambda shape, n: 1.0
    assert world.rounds_until_good(policy, 8, 20_000) <= (0 if slow_of == "all" else 3000)
    world.serve(policy, 8, 1000)
    assert world.rate(policy.present, 8) > 0.95 * world.rate(best, 8)


def test_a_shape_that_is_slower_than_its_table_is_left() -> None:
    policy, world = new_policy(device(64)), World(device(64), HIGH, noise=0.03)
    best = world.best(policy.shapes, 8)
    world.slower = lambda shape, n: 1.6 if shape == best else 1.0
    left = world.best(policy.shapes, 8)
    assert left != best
    chosen = world.serve(policy, 8, 4000)
    assert chosen[-3000:].count(best) < 600
    assert world.rate(policy.present, 8) > 0.9 * world.rate(left, 8)
    blind = new_policy(device(64))  # the control: without times it stays
    blind.observe_time = lambda *args: None  # type: ignore[method-assign]
    assert World(device(64), HIGH).serve(blind, 8, 4000)[-3000:].count(best) > 2000


@pytest.mark.parametrize("compares", [True, False])
def test_drafts_that_cost_more_than_their_tables_are_left_for_plain_rounds(
    monkeypatch: pytest.MonkeyPatch, compares: bool
) -> None:
    """All trees of 8 requests take 1.5 times what the tables say; without comparisons, the control, they are kept."""
    if not compares:
        compare_nothing(monkeypatch)
    costs = device(12)
    policy, world = new_policy(costs), World(costs, MIDDLE, noise=0.05)
    world.serve(policy, 1, 200)
    world.slower = lambda shape, n: 1.0 if shape == PLAIN else 1.5
    assert world.best(policy.shapes, 8) == PLAIN
    chosen = world.serve(policy, 8, 1000)
    assert (chosen[32:].count(PLAIN) > 900) == compares
    world.slower = lambda shape, n: 1.0
    assert world.best(policy.shapes, 8) != PLAIN
    world.serve(policy, 8, 2000)
    assert policy.present != PLAIN


@pytest.mark.parametrize(("compares", "deferred"), [(True, 0), (True, 128), (False, 0)])
def test_drafts_that_cost_less_than_their_tables_are_found_from_plain_rounds(
    monkeypatch: pytest.MonkeyPatch, compares: bool, deferred: int
) -> None:
    """All trees of 64 requests take 0.6 of what the tables say, by which plain rounds are best: drafts give 1.38x.

    Single probes have no time: without rounds that compare, the control, the server stays off. deferred: tokens per
    request that the head reads before it drafts.
    """
    if not compares:
        compare_nothing(monkeypatch)
    costs = device(64, level=0.1)
    policy, world = new_policy(costs), World(costs, HIGH, slower=lambda shape, n: 1.0 if shape == PLAIN else 0.6)
    best = world.best(policy.shapes, 64)
    assert world.rate(best, 64) > 1.3 * world.rate(PLAIN, 64)
    world.serve(policy, 64, 200)
    assert policy.present == PLAIN
    choose = policy.choose
    monkeypatch.setattr(policy, "choose", lambda b, keys: choose(b, keys, None, deferred))
    chosen = world.serve(policy, 64, 5800)
    assert (policy.present == PLAIN) != compares
    assert (chosen[-1000:].count(best) > 900) == compares


def loss(sigma: float) -> float:
    """Part of the time that is lost against the true best shape, in 2,500 rounds from the start on.

    The tables are wrong by shape (sigma is the standard deviation of the logarithm); the machine changes its speed.
    """
    lost = total = 0.0
    for free_rows, b, accepts, seed in product((1.5, 4), (1, 8), (MIDDLE, HIGH), range(3)):
        costs, gen = device(free_rows * b), random.Random(seed)
        policy, world = new_policy(costs, Shape(2, 4, 8)), World(costs, accepts, seed=seed, noise=0.05)
        wrong = {shape: math.exp(gen.gauss(0, sigma)) for shape in policy.shapes}
        speeds = list(accumulate((gen.gauss(0, 0.02) for _ in range(2501)), lambda speed, x: 0.995 * speed + x))
        world.slower = lambda shape, n, wrong=wrong, speeds=speeds: wrong[shape] * math.exp(speeds[n])  # type: ignore[misc]
        chosen = world.serve(policy, b, 2500)
        world.slower = lambda shape, n, wrong=wrong: wrong[shape]  # type: ignore[misc]
        best = world.rate(world.best(policy.shapes, b), b)
        for shape in chosen:
            seconds = costs.round(shape, b, 0) * wrong[shape]
            total += seconds
            lost += seconds * (1 - world.rate(shape, b) / best)
    return lost / total


@pytest.mark.parametrize(("sigma", "most"), [pytest.param(0.0, 0.025, marks=pytest.mark.matrix), (0.15, 0.03)])
def test_wrong_tables_cost_little_where_shapes_are_compared(
    monkeypatch: pytest.MonkeyPatch, sigma: float, most: float
) -> None:
    compared = loss(sigma)
    compare_nothing(monkeypatch)
    uncompared = loss(sigma)
    print(f"loss {compared:.4f}, without comparisons {uncompared:.4f}")
    assert compared < most
    assert (compared < uncompared) == (sigma > 0)  # the control


@pytest.mark.parametrize("jump", [-3600.0, 0.0, 1e9, math.nan, math.inf])
def test_a_clock_that_jumps_changes_no_choice(jump: float) -> None:
    policy, world = new_policy(device(64)), World(device(64), HIGH)
    world.serve(policy, 8, 500)
    best = policy.present
    for _ in range(5):
        policy.observe_time(best, 8, 0, jump)
        policy.observe_time(CAPS, 8, 0, jump)
        world.serve(policy, 8, 40)
        assert world.rate(policy.present, 8) > 0.9 * world.rate(best, 8)
    world.serve(policy, 8, 300)
    assert policy.present == best
