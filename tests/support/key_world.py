"""Rounds that take what a formula says, where long prefixes cost something, with 1 % of noise."""

from __future__ import annotations

import math
import random

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import Costs
from eagle_plugin.runtime.round_costs import Phases

B, KEYS = 64, 512_000  # requests, and the tokens of all their prefixes
ROOM, CONTEXT = 600_000, 8192  # tokens of the caches, and of the longest prefix


class KeyWorld:
    """The seconds of forwards over b requests, R rows of each, and prefixes of L tokens."""

    def __init__(self, share: float, seed: int) -> None:
        """share: of a forward over one row, what 4,096 tokens add to it."""
        self._per_key, self._random = share * 0.01 / 4096, random.Random(seed)

    def target(self, b: int, rows: int, prefix: int) -> float:
        return self._noisy(0.01 * (1 + b * rows / 500) + b * prefix * self._per_key * (1 + rows / 20))

    def head(self, b: int, rows: int, prefix: int) -> float:
        return self._noisy(0.001 * (1 + b * rows / 500) + b * prefix * self._per_key / 16)

    def phases(self, shape: Shape, b: int, prefix: int) -> Phases:
        levels = sum(self.head(b, shape.topk, prefix) for _ in range(1, shape.steps))
        draft = self._noisy(0.0005) + levels
        return Phases(draft, self.target(b, shape.width, prefix), self.head(b, shape.max_accept_length, prefix))

    def error(self, costs: Costs, caps: Shape) -> float:
        """By which share the believed ratio of rounds of the caps and plain ones is off, with long prefixes."""
        exact = KeyWorld(self._per_key * 4096 / 0.01, 0)
        exact._noisy = lambda seconds: seconds  # type: ignore[method-assign]
        true = sum(exact.phases(caps, B, KEYS // B)) / exact.target(B, 1, KEYS // B)
        return costs.round(caps, B, KEYS) / costs.round(PLAIN, B, KEYS) / true - 1

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._random.gauss(0, 0.01))


def longest(b: int) -> int:
    """Tokens of each prefix for which b requests have room."""
    return min(CONTEXT, ROOM // b - 32)
