"""A small world for the policy: synthetic costs, and acceptance drawn with known probabilities."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from operator import methodcaller

import pytest

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy import policy as module
from eagle_plugin.policy.costs import CostModel, Costs, Curve, Forward, size_class
from eagle_plugin.policy.policy import Policy

CAPS = Shape(4, 4, 16)
# The chance that the target takes a node's first, second .. child.
HIGH, MIDDLE, LOW = (0.8, 0.1, 0.05, 0.02), (0.5, 0.2, 0.1, 0.05), (0.2, 0.05, 0.03, 0.02)
SURE = (0.95, 0.01, 0.0, 0.0)  # a head that is nearly always right: siblings are of no use


def new_policy(costs: Costs, caps: Shape = CAPS) -> Policy:
    return Policy(caps, CostModel(costs))


@cache
def tree_sums(shape: Shape, children: tuple[float, ...]) -> tuple[float, ...]:
    """The chance of accepting a node of each depth, where the target takes a node's i-th child with children[i].

    The tree is grown as `core.tree` does it: the best K nodes of a level get K children each, the best W - 1 are kept.
    """
    kept: list[tuple[float, int]] = []
    frontier = [1.0]
    for depth in range(1, shape.steps + 1):
        level = sorted((node * p for node in frontier for p in children[: shape.topk]), reverse=True)
        kept += [(score, depth) for score in level]
        frontier = level[: shape.topk]
    best = sorted(kept, reverse=True)[: shape.width - 1]
    return tuple(sum(score for score, at in best if at == depth) for depth in range(1, shape.steps + 1))


def device(free_rows: int, level: float = 0.05, fixed: float = 0.02) -> Costs:
    """A target that takes one unit of time for up to free_rows rows and for more rows proportionally longer."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    target = Forward(Curve.of((n, max(1.0, n / free_rows)) for n in rows), per_key=1e-6)
    draft = Forward(Curve.of((n, level * max(1.0, n / free_rows)) for n in rows))
    return Costs(target, draft, draft, fixed)


class World:
    """Serves rounds: it has the true acceptance, the head's estimate of it, and the true times."""

    def __init__(
        self,
        costs: Costs,
        accepts: Sequence[float],
        predicts: Sequence[float] | None = None,
        seed: int = 0,
        noise: float = 0.0,
        slower: Callable[[Shape, int], float] = lambda shape, round_number: 1.0,
        late: int = 0,
    ) -> None:
        """accepts: the chance that the target takes a node's first, second .. child; predicts: the head's estimate.

        noise: standard deviation of the logarithm of a round's time; slower: what the tables do not know of times;
        late: rounds after which a choice takes effect and a result is told, as where an engine schedules ahead.
        """
        self.late = late
        self._choices: deque[Shape] = deque()
        self._told: deque[list[Callable[[Policy], None]]] = deque()
        self.costs = costs
        self.accepts, self.predicts = tuple(accepts), tuple(predicts or accepts)
        self.noise, self.slower = noise, slower
        self.random = random.Random(seed)
        self.rounds, self.tokens, self.seconds = 0, 0.0, 0.0
        self._last: tuple[Shape, int] | None = None
        self._same = 0  # rounds since the shape changed

    def rate(self, shape: Shape, b: int, keys: int = 0) -> float:
        """True expected tokens per unit of time."""
        seconds = self.costs.round(shape, b, keys) * self.slower(shape, self.rounds)
        return b * (1 + sum(tree_sums(shape, self.accepts))) / seconds

    def best(self, shapes: Sequence[Shape], b: int, keys: int = 0) -> Shape:
        """By enumeration."""
        return max(shapes, key=lambda shape: self.rate(shape, b, keys))

    def serve(self, policy: Policy, b: int, n: int, keys: int = 0) -> list[Shape]:
        """n rounds of b requests; returns the chosen shapes."""
        chosen = []
        for _ in range(n):
            self._choices.append(policy.choose(b, keys))
            shape = self._choices[0]
            if len(self._choices) > self.late:
                self._choices.popleft()
            chosen.append(shape)
            told: list[Callable[[Policy], None]] = []
            self.rounds += 1
            seconds = self.costs.round(shape, b, keys) * self.slower(shape, self.rounds)
            seconds *= math.exp(self.random.gauss(0, self.noise))
            # As the chooser does: a time counts if the round before was of the same shape and size class.
            if self._last == (shape, size_class(b)):
                told.append(methodcaller("observe_time", shape, b, keys, seconds))
            tokens = b
            # The first of every four rounds of one shape tells its path sums.
            self._same = self._same + 1 if self._last is not None and self._last[0] == shape else 0
            self._last = shape, size_class(b)
            if shape != PLAIN and self._same % 4 == 0:
                covered = [x for x in policy.shapes if x.steps <= shape.steps and x.topk <= shape.topk]
                sums = {x: tree_sums(x, self.predicts) for x in covered}
                told.append(methodcaller("observe_sums", shape, b, sums))
            if shape != PLAIN:
                # Of the nodes of one depth at most one is accepted, and its parent with it: one draw per request.
                draws = [self.random.random() for _ in range(b)]
                reached = [sum(u < chance for u in draws) for chance in tree_sums(shape, self.accepts)]
                told.append(methodcaller("observe_accepted", shape, b, reached))
                tokens += sum(reached)
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
            self._told.append(told)
            if len(self._told) > self.late:
                for tell in self._told.popleft():
                    tell(policy)
        return chosen

    def rounds_until_good(self, policy: Policy, b: int, most: int) -> int:
        """Rounds until the policy's present shape has 0.9 of the best one's rate."""
        best = self.rate(self.best(policy.shapes, b), b)
        for n in range(most):
            if self.rate(policy.present, b) >= 0.9 * best:
                return n
            self.serve(policy, b, 1)
        return most


def compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no shape be served only to compare its time."""
    monkeypatch.setattr(module, "PLAIN_EVERY", math.inf)
    monkeypatch.setattr(module, "COMPARED_FOR", 0)
