"""The test that decides a rollback."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from eagle_plugin.learning.deploy.counts import ROUNDS_PER_ANSWER, Counts
from eagle_plugin.learning.deploy.verdict import compare


def counts(*rounds: int) -> Counts:
    """Of rounds that accepted no draft, one, two, ..."""
    return Counts.of_rounds(Counter(dict(enumerate(rounds))))


def test_a_clearly_worse_head_is_worse_and_the_way_back_is_not() -> None:
    """The test is one-sided: only a loss counts."""
    good, bad = counts(500, 1000, 1500), counts(2500, 400, 100)
    comparison = compare(good, bad)
    assert comparison.is_worse and (comparison.before, comparison.after) == (pytest.approx(7 / 3), pytest.approx(1.2))
    assert not compare(bad, good).is_worse
    assert compare(bad, good).z == pytest.approx(-comparison.z)


def test_too_few_rounds_decide_nothing() -> None:
    """The same shares of 390 rounds are no evidence that may undo an exchange."""
    comparison = compare(counts(50, 100, 240), counts(340, 40, 10))
    assert comparison.z < -3 and not comparison.enough and not comparison.is_worse


def test_heads_that_never_vary_are_compared_by_their_means() -> None:
    """A variance of zero on both sides divides nothing."""
    assert compare(counts(0, 0, 500), counts(500)).is_worse
    assert compare(counts(0, 500), counts(0, 500)).z == 0.0


def test_an_equal_head_is_seldom_called_worse() -> None:
    """Of 400 exchanges of a head with itself about four are called worse, never twelve, though answers differ."""
    draw = random.Random(0)

    def served() -> Counts:
        """40 answers; all rounds of one are alike, which no independent rounds would be."""
        kept = draw.choices((0, 1, 2), (5, 3, 2), k=40)
        return Counts.of_rounds(Counter(kept * int(ROUNDS_PER_ANSWER)))

    assert sum(compare(served(), served()).is_worse for _ in range(400)) < 12
