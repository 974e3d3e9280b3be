"""Predicts how many tokens a tree of each shape yields: the head's path scores, calibrated by what was accepted.

The score of a path is the head's estimate that the target will take it, so the sum of the scores of a tree's nodes
estimates its accepted tokens, also of trees that were not drafted. Such sums, by depth, predict a round twice as well
as the past rounds do. What is left is a factor per depth, the product of one correction per level: accepted over
predicted nodes of this level after an accepted node of the level before. A level of which little is known is taken to
err as the one above it. All counts age.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from eagle_plugin.core.shape import Shape

SUM_MEMORY = 20  # requests' rounds after which a measured sum has 1/e of its weight
FACTOR_MEMORY = 60  # the same of the counts of a factor
UNSEEN_MEMORY = 600  # the same where the drafted trees did not reach
FEWEST_ROUNDS = 10  # of a batch, that a memory spans at least
PRIOR = 2.0  # accepted tokens per level: the weight of the level above
# The chance that the target takes a node's first, second .. child, of a head that nothing is known of.
TYPICAL = (0.6, 0.15, 0.07, 0.04)


class Survival:
    """The expected accepted tokens of a round, by shape; all numbers are means over the requests of a batch."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._sums = {shape: typical_sums(shape) for shape in shapes}  # by depth 1 .. steps
        depth = max(shape.steps for shape in shapes)
        self._accepted = [0.0] * depth
        self._predicted = [0.0] * depth
        self._weight = 0.0  # of these counts, in requests
        self._expected: dict[Shape, float] | None = None  # until something is observed

    def expected(self) -> Mapping[Shape, float]:
        """Accepted drafted tokens per request and round, without the bonus token, by shape."""
        if self._expected is None:
            factors = self.factors()
            self._expected = {shape: sum(map(mul, factors, sums)) for shape, sums in self._sums.items()}
        return self._expected

    def factors(self) -> list[float]:
        """Accepted over predicted tokens, by depth from 1 on."""
        factor, correction, factors = 1.0, 1.0, []
        for accepted, predicted in zip(self._accepted, self._predicted, strict=True):
            correction = (accepted + PRIOR * correction) / (predicted + PRIOR)
            factor *= correction
            factors.append(factor)
        return factors

    def observe_sums(self, shape: Shape, b: int, sums: Mapping[Shape, Sequence[float]]) -> None:
        """Learn the sums of path scores of a round of b requests that drafted this shape.

        sums has those of every shape that the drafted candidates cover, the drafted one among them. At the same depth
        the others change as the drafted one does; at further levels each changes as much again as its last level. Sums
        that are not finite, of features that overflowed, tell nothing: a mean would keep them for ever.
        """
        if not all(math.isfinite(x) for values in sums.values() for x in values):
            return
        self._expected = None
        rate = 1 - _kept(b, SUM_MEMORY)
        before = self._sums[shape]
        for covered, values in sums.items():
            old = self._sums[covered]
            self._sums[covered] = [x + rate * (new - x) for x, new in zip(old, values, strict=True)]
        changes = [new / old if old > 0 else 1.0 for new, old in zip(self._sums[shape], before, strict=True)]
        above, last = ([1.0, 1.0, *changes])[-2:]
        again = last / above if above > 0 else 1.0
        changes += [last * again**level for level in range(1, len(self._accepted) - shape.steps + 1)]
        for other in self._sums.keys() - sums.keys():
            self._sums[other] = [min(x * change, 1.0) for x, change in zip(self._sums[other], changes, strict=False)]

    def observe_accepted(self, shape: Shape, b: int, reached: Sequence[int]) -> None:
        """Learn from b requests that verified trees of this shape.

        reached[d] of them accepted a node of depth d + 1.
        """
        self._expected = None
        kept, unseen = _kept(b, FACTOR_MEMORY), _kept(b, UNSEEN_MEMORY)
        # What a larger batch taught counts as what so many requests teach in the long run: else it would outweigh them.
        fewer = min(1.0, b / (1 - kept) / self._weight) if self._weight else 1.0
        kept, unseen = kept * fewer, unseen * fewer
        self._weight = kept * self._weight + b
        before, sum_before = float(b), 1.0
        for depth, (accepted, total) in enumerate(zip(reached, self._sums[shape], strict=True)):
            predicted = before * total / sum_before if sum_before > 0 else 0.0
            self._accepted[depth] = kept * self._accepted[depth] + accepted
            self._predicted[depth] = kept * self._predicted[depth] + predicted
            before, sum_before = accepted, total
        for depth in range(shape.steps, len(self._accepted)):
            self._accepted[depth] *= unseen
            self._predicted[depth] *= unseen


def typical_sums(shape: Shape) -> list[float]:
    """The sums of path scores by depth of the best tree of this shape under `TYPICAL`, whatever the context."""
    nodes: list[tuple[float, int]] = []  # (score, depth) of all candidates
    level = [1.0]
    for depth in range(1, shape.steps + 1):
        level = sorted((score * p for score in level for p in TYPICAL[: shape.topk]), reverse=True)
        nodes += ((score, depth) for score in level)
        level = level[: shape.topk]
    best = sorted(nodes, reverse=True)[: shape.width - 1]
    return [sum(score for score, at in best if at == depth) for depth in range(1, shape.steps + 1)]


def _kept(b: int, memory: int) -> float:
    """Of what was known, after a round of b requests."""
    return (1 - 1 / memory) ** min(b, memory // FEWEST_ROUNDS)


def reached_depths(kept: Sequence[int], steps: int) -> list[int]:
    """How many requests accepted a node of each depth, 1 .. steps; kept: the accepted tokens of each."""
    ended = [0] * (steps + 1)
    for n in kept:
        ended[n] += 1
    return [*accumulate(reversed(ended))][-2::-1]
