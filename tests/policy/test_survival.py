"""Expected accepted tokens: typical trees by enumeration, and what path sums and accepted counts teach."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from policy_world import tree_sums

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.policy.survival import TYPICAL, Survival, typical_sums

CAPS = Shape(4, 4, 16)
SHAPES = shapes_within(CAPS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_typical_sums_are_those_of_the_grown_tree(shape: Shape) -> None:
    assert typical_sums(shape) == pytest.approx(list(tree_sums(shape, TYPICAL)))


@pytest.mark.parametrize("shape", [Shape(1, 2, 3), Shape(2, 2, 4), Shape(2, 3, 5), Shape(3, 2, 4)], ids=str)
def test_a_typical_tree_is_the_best_of_all_trees_of_its_shape(shape: Shape) -> None:
    """Every set of W - 1 nodes with their parents is tried: K children per node, depth D."""
    paths = [path for depth in range(1, shape.steps + 1) for path in product(range(shape.topk), repeat=depth)]
    best = 0.0
    for nodes in combinations(paths, shape.width - 1):
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes):
            total = 0.0
            for path in nodes:
                chance = 1.0
                for child in path:
                    chance *= TYPICAL[child]
                total += chance
            best = max(best, total)
    assert sum(typical_sums(shape)) == pytest.approx(best)


def test_expected_tokens_before_anything_is_known() -> None:
    found = Survival(SHAPES).expected()
    assert found[PLAIN] == 0.0
    assert {shape: sum(typical_sums(shape)) for shape in SHAPES} == pytest.approx(dict(found))


def draw(chances: Sequence[float], b: int, gen: random.Random) -> list[int]:
    draws = [gen.random() for _ in range(b)]
    return [sum(u < chance for u in draws) for chance in chances]


@pytest.mark.parametrize("b", [1, 32])
def test_the_factors_learn_what_the_sums_do_not_say(b: int) -> None:
    """The head promises typical trees; its target takes half of each level's nodes that follow an accepted one."""
    gen, survival, chain = random.Random(0), Survival(SHAPES), Shape.chain(4)
    chances = [total * 0.5**depth for depth, total in enumerate(typical_sums(chain), start=1)]
    errors = []
    for turn in range(4000):
        survival.observe_accepted(chain, b, draw(chances, b, gen))
        if turn > 400:
            errors.append(survival.expected()[chain] / sum(chances) - 1)
    assert abs(sum(errors) / len(errors)) < 0.05
    assert max(map(abs, errors)) < (0.8 if b == 1 else 0.3)
    assert survival.factors()[0] == pytest.approx(0.5, rel=0.4 if b == 1 else 0.1)


def test_a_level_that_is_not_drafted_is_taken_to_err_as_the_one_above() -> None:
    survival, short = Survival(SHAPES), Shape.chain(2)
    one, two = typical_sums(short)
    for _ in range(100):
        survival.observe_accepted(short, 100, [round(100 * one / 2), round(100 * two / 4)])
    assert survival.factors() == pytest.approx([0.5, 0.25, 0.125, 0.0625], rel=0.02)


def test_what_deep_trees_taught_fades_slowly_while_trees_are_shallow() -> None:
    survival, deep, shallow = Survival(SHAPES), Shape.chain(4), Shape.chain(1)
    sums = typical_sums(deep)
    for _ in range(100):  # the head's third level is worthless
        survival.observe_accepted(deep, 100, [round(100 * sums[0]), round(100 * sums[1]), 0, 0])
    learned = survival.factors()[2]
    seen = []
    for _ in range(400):
        survival.observe_accepted(shallow, 100, [round(100 * sums[0])])
        seen.append(survival.factors()[2])
    assert learned < 0.1 and seen[20] < 0.3
    assert seen[-1] > 0.8
    assert seen == sorted(seen)


def test_sums_are_averaged_over_some_rounds() -> None:
    survival, chain = Survival(SHAPES), Shape.chain(2)
    for _ in range(200):
        survival.observe_sums(chain, 1, {chain: [0.9, 0.5]})
    assert survival.expected()[chain] == pytest.approx(1.4, rel=1e-3)
    survival.observe_sums(chain, 1, {chain: [math.nan, 0.5]})  # of features that overflowed
    assert survival.expected()[chain] == pytest.approx(1.4, rel=1e-3)
    survival.observe_sums(chain, 1, {chain: [0.0, 0.0]})
    assert survival.expected()[chain] == pytest.approx(1.4 * 0.95, rel=1e-3)
    survival.observe_sums(chain, 1000, {chain: [0.0, 0.0]})  # a large batch tells more
    assert survival.expected()[chain] == pytest.approx(1.4 * 0.95 * 0.95**2, rel=1e-3)


def test_shapes_that_are_not_covered_change_with_the_drafted_one() -> None:
    survival, chain = Survival(SHAPES), Shape.chain(2)
    before = dict(survival.expected())
    for _ in range(200):
        survival.observe_sums(chain, 8, {chain: [x / 2 for x in typical_sums(chain)]})
    after = survival.expected()
    for shape in SHAPES:
        assert after[shape] == pytest.approx(before[shape] / 2, rel=1e-3)


def test_no_depth_is_reached_more_than_always() -> None:
    survival, chain = Survival(SHAPES), Shape.chain(1)
    for _ in range(200):
        survival.observe_sums(chain, 8, {chain: [1.0]})
    assert max(survival.expected()[shape] / shape.steps for shape in SHAPES if shape != PLAIN) <= 1.0


def test_sums_of_zero_are_survived() -> None:
    """A head whose logits are not numbers: all its candidates are impossible, and then it is well again."""
    survival = Survival(SHAPES)
    for _ in range(3000):
        survival.observe_sums(CAPS, 8, {shape: [0.0] * shape.steps for shape in SHAPES})
        survival.observe_accepted(CAPS, 8, [0] * CAPS.steps)
    assert max(survival.expected().values()) < 1e-6
    for _ in range(200):
        survival.observe_sums(CAPS, 8, {shape: typical_sums(shape) for shape in SHAPES})
    assert survival.expected()[CAPS] == pytest.approx(sum(typical_sums(CAPS)), rel=0.1)
