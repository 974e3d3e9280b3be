"""The test that decides a rollback."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from eagle_plugin.deploy.verdict import compare


def test_a_clearly_worse_head_is_worse_and_the_way_back_is_not() -> None:
    """The test is one-sided: only a loss counts."""
    good, bad = {1: 50, 2: 100, 3: 150}, {1: 250, 2: 40, 3: 10}
    assert compare(good, bad).is_worse
    assert not compare(bad, good).is_worse
    assert compare(bad, good).z == pytest.approx(-compare(good, bad).z)


def test_too_few_rounds_decide_nothing() -> None:
    """The same shares of 60 rounds are no evidence that may undo a swap."""
    comparison = compare({3: 60}, {1: 60})
    assert not comparison.enough
    assert not comparison.is_worse


def test_heads_that_never_vary_are_compared_by_their_means() -> None:
    """A variance of zero on both sides divides nothing."""
    assert compare({3: 200}, {1: 200}).is_worse
    assert compare({2: 200}, {2: 200}).z == 0.0


def test_an_equal_head_is_seldom_called_worse() -> None:
    """Of 400 swaps of a head with itself about four are called worse, never twelve."""
    draw = random.Random(0)

    def rounds() -> Counter[int]:
        return Counter(draw.choices((1, 2, 3), (5, 3, 2), k=300))

    assert sum(compare(rounds(), rounds()).is_worse for _ in range(400)) < 12


@pytest.mark.parametrize("rounds", [{}, {1: 0}, {0: 3}, {2: -1}])
def test_counts_that_cannot_be_are_refused(rounds: dict[int, int]) -> None:
    """No rounds, an accept length of 0 and a negative count have no mean."""
    with pytest.raises(ValueError, match="accept length"):
        compare({1: 10}, rounds)
