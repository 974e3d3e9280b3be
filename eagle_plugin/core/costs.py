"""What a decode round costs: tables of measured seconds, interpolated, and corrected by the rounds that were served."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from eagle_plugin.core.shape import PLAIN, Shape

PENDING_TOKENS = 32  # tokens of plain rounds per request: when there are so many, the head reads them
# One served round moves the estimates by so much of what it differs from its prediction.
SPEED_RATE = 0.2  # of the machine: all shapes alike
SHAPE_RATE = 0.05  # of one shape at one batch size
LARGEST_ERROR = math.log(2)  # a round that takes longer than twice its prediction counts as twice: others disturbed it
KEYS_STEP = 64  # tokens of a prefix: the cost of a round is computed once for so many
MOST_TABLES = 10_000  # computed costs that are kept
FORGETTING = 0.999  # per round: what was learned of shapes that are not served fades


class Curve(NamedTuple):
    """Seconds of a forward by its number of rows."""

    rows: tuple[int, ...]  # at which it was measured, ascending
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """The curve under (rows, seconds) points, at least one.

        A busy machine only adds time, and fewer rows never take more: the shortest time of so many rows or more counts.
        """
        shortest: dict[int, float] = {}
        least = math.inf
        for rows, seconds in sorted(points, reverse=True):
            shortest[rows] = least = min(least, seconds)
        ordered = sorted(shortest)
        return cls(tuple(ordered), tuple(shortest[rows] for rows in ordered))

    def at(self, rows: int) -> float:
        """Linear between the measured rows; the first value before them, the last two points' line after them."""
        i = bisect_left(self.rows, rows)
        if i < len(self.rows) and self.rows[i] == rows or i == 0:
            return self.seconds[min(i, len(self.rows) - 1)]
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        j = min(i, len(self.rows) - 1)
        (left, right), (low, high) = self.rows[j - 1 : j + 1], self.seconds[j - 1 : j + 1]
        slope = (high - low) / (right - left)
        if i == len(self.rows):  # noise must not make more rows cheaper for ever
            return high + max(slope, high / right / 2) * (rows - right)
        return low + slope * (rows - left)


class Forward(NamedTuple):
    """Seconds of one forward of a model in a decode round, over R rows of each of b requests."""

    curve: Curve  # by b * R, over short prefixes
    per_key: float = 0.0  # seconds per token of the prefixes of all requests
    per_key_and_row: float = 0.0  # the same, per row of a request

    def seconds(self, b: int, rows: int, keys: int) -> float:
        """keys: tokens of the prefixes of all b requests."""
        return self.curve.at(b * rows) + keys * (self.per_key + self.per_key_and_row * rows)


class Costs(NamedTuple):
    """Seconds of the parts of a round of b requests, measured on one machine with one pair of models."""

    target: Forward  # W rows: the target's forward over the trees, and the walk
    level: Forward  # K rows: one level of the draft, the head's forward and the choice of the next nodes
    extend: Forward  # E rows: the move of the accepted keys, and the head's forward over the accepted tokens
    fixed: float = 0.0  # of every round: the engine's scheduler and what no table has

    def round(self, shape: Shape, b: int, keys: int) -> float:
        """Seconds of a round of b requests whose prefixes have `keys` tokens together."""
        seconds = self.fixed + self.target.seconds(b, shape.width, keys)
        if shape == PLAIN:
            return seconds + self.extend.seconds(b, PENDING_TOKENS, keys) / PENDING_TOKENS
        seconds += self.extend.seconds(b, shape.max_accept_length, keys)
        return seconds + (shape.steps - 1) * self.level.seconds(b, shape.topk, keys)


class CostModel:
    """`Costs`, corrected by the rounds that were served.

    A correction has two parts: the speed of the machine now, which no choice depends on, and what a shape costs more or
    less than its table says. All inputs are numbers of the host. Ranks that must choose alike share both.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.speed = 0.0  # log of measured over predicted seconds, of all shapes
        self.errors: dict[
            tuple[Shape, int], float
        ] = {}  # the same of (shape, size class of the batch), without `speed`
        self._rounds = 0
        self._seen: dict[tuple[Shape, int], int] = {}  # round in which it was served last
        self._tables: dict[tuple[Shape, int, int], float] = {}

    def seconds(self, shapes: Iterable[Shape], b: int, keys: int) -> dict[Shape, float]:
        """What a round of each shape will take at the present speed of the machine."""
        return {
            shape: self._table(shape, b, keys) * math.exp(self.speed + self._error((shape, b.bit_length())))
            for shape in shapes
        }

    def observe(self, shape: Shape, b: int, keys: int, seconds: float) -> None:
        """Learn from one served round; a time that is not positive (a clock was set) counts for nothing."""
        if not seconds > 0 or math.isinf(seconds):
            return
        self._rounds += 1
        key = shape, b.bit_length()
        before = self._error(key)
        error = math.log(seconds / self._table(shape, b, keys)) - self.speed - before
        error = max(-LARGEST_ERROR, min(LARGEST_ERROR, error))
        self.speed += SPEED_RATE * error
        self.errors[key] = before + SHAPE_RATE * error
        self._seen[key] = self._rounds

    def _error(self, key: tuple[Shape, int]) -> float:
        error = self.errors.get(key)
        return 0.0 if error is None else error * FORGETTING ** (self._rounds - self._seen[key])

    def _table(self, shape: Shape, b: int, keys: int) -> float:
        """`Costs.round`, for a number of keys that is rounded to KEYS_STEP per request, and kept."""
        step = b * KEYS_STEP
        rounded = (keys + step // 2) // step * step
        key = shape, b, rounded
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[key] = self.costs.round(shape, b, rounded)
        return self._tables[key]
