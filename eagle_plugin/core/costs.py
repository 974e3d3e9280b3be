"""What a decode round costs: tables of measured seconds, interpolated, and corrected by the rounds that were served."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from eagle_plugin.core.shape import PLAIN, Shape

# The phases of a round: the head's forwards that draft levels; the target's forward over the trees, with the walk; the
# head's forward over the accepted tokens, with the move of their keys; all else.
PHASES = ("draft", "verify", "extend", "fixed")
PENDING_TOKENS = 32  # tokens of plain rounds per request that the head reads in one forward
# One served round moves an estimate by so much of what it differs from its prediction.
RATE = 0.2
CHANGE_ROUNDS = 8  # rounds after a change of shape whose times are compared with those before it
LARGEST_ERROR = math.log(2)  # a round that takes longer than twice its prediction counts as twice: others disturbed it
FORGETTING = 0.999  # per round: what was learned of shapes that are not served fades


def size_class(b: int) -> int:
    """The class of batches that errors are learned of: b rounded to a power of two, in the logarithm.

    Powers of two, which numbers of clients often are, are in the middle of their classes.
    """
    return ((2 * b * b).bit_length() - 1) // 2


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
        fixed, per_key = self.line(b, rows)
        return fixed + keys * per_key

    def line(self, b: int, rows: int) -> tuple[float, float]:
        """Seconds with empty prefixes, and seconds per token of the prefixes of all b requests."""
        return self.curve.at(b * rows), self.per_key + self.per_key_and_row * rows


class Costs(NamedTuple):
    """Seconds of the parts of a round of b requests, measured on one machine with one pair of models."""

    target: Forward  # W rows: the target's forward over the trees, and the walk
    # K rows: one level of the draft, the head's forward and the choice of the next nodes; or of a head that drafts all
    # levels in one forward, D - 1 rows: all levels after the first.
    level: Forward
    extend: Forward  # E rows: the move of the accepted keys, and the head's forward over the accepted tokens
    fixed: float = 0.0  # of every round: the engine's scheduler and what no table has
    is_parallel: bool = False  # whether the head drafts all levels in one forward
    prompt_token: float = 0.0  # for the head to read one token of a prompt, where it does so only in order to draft

    def round(self, shape: Shape, b: int, keys: int) -> float:
        """Seconds of a round of b requests whose prefixes have `keys` tokens together."""
        fixed, per_key = self.line(shape, b)
        return fixed + keys * per_key

    def line(self, shape: Shape, b: int) -> tuple[float, float]:
        """Seconds of a round with empty prefixes, and seconds per token of the prefixes."""
        fixed, per_key = zip(*self.phase_lines(shape, b), strict=True)
        return sum(fixed), sum(per_key)

    def phase_lines(self, shape: Shape, b: int) -> tuple[tuple[float, float], ...]:
        """`line` of each of the `PHASES`. In a plain round the head does not run; it reads later, see `catch_up`."""
        levels, rows = max(shape.steps - 1, 0), shape.topk
        if self.is_parallel:
            levels, rows = min(levels, 1), levels
        parts = (
            (levels, self.level.line(b, rows)),
            (1.0, self.target.line(b, shape.width)),
            (shape != PLAIN, self.extend.line(b, shape.max_accept_length)),
            (1.0, (self.fixed, 0.0)),
        )
        return tuple((times * fixed, times * per_key) for times, (fixed, per_key) in parts)


def rate(shape: Shape, tokens: float, seconds: float, reading: float) -> float:
    """Tokens per second of rounds of a shape, which take `seconds` for so many tokens.

    reading: seconds per output token in which the head reads prompts, if there are drafts.
    """
    return tokens / (seconds if shape == PLAIN else seconds + tokens * reading)


class CostModel:
    """`Costs`, corrected by the rounds that were served.

    A correction has two parts: the speed of the machine now, which no choice depends on, and what a shape costs more or
    less than its table says. What changes while the shape stays is the machine's. What changes with the shape is the
    shapes': half of it is added to the error of the new one and half is taken from the error of the one before, so that
    a machine that becomes slower just then costs no shape anything after the next change. What changes with the size of
    the batch is no shape's, since tables can be wrong about sizes too: until the speed is known at the new size, no
    error is learned. All inputs are numbers of the host. Ranks that must choose alike share both.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.speed = 0.0  # log of measured over predicted seconds, of all shapes
        # The same, without `speed`, of one shape at one size class of the batch, and the round that it was learned in.
        self.errors: dict[int, dict[Shape, tuple[float, int]]] = {}
        self._rounds = 0
        self._served: tuple[int, Shape] | None = None  # the last one
        self._before: tuple[int, Shape] | None = None  # the one before the last change, if it tells of the shapes
        self._since_change = 0
        self._of_size = 0  # rounds since batches were of another size class
        self._tables: dict[int, dict[Shape, tuple[float, float]]] = {}
        self._phase_lines: dict[tuple[int, Shape], tuple[tuple[float, float], ...]] = {}

    def seconds(self, shapes: Iterable[Shape], b: int, keys: int) -> dict[Shape, float]:
        """What a round of each shape will take at the present speed of the machine."""
        table = self._tables.setdefault(b, {})
        errors = self.errors.get(size_class(b), {})
        speed = math.exp(self.speed)
        found = {}
        for shape in shapes:
            fixed, per_key = table.get(shape) or table.setdefault(shape, self.costs.line(shape, b))
            found[shape] = (fixed + keys * per_key) * speed
        for shape in errors.keys() & found.keys():
            found[shape] *= math.exp(self._error((size_class(b), shape)))
        return found

    def prompt_token(self) -> float:
        """Seconds that a token of a prompt costs because there are drafts."""
        return self.costs.prompt_token * math.exp(self.speed)

    def catch_up(self, b: int, keys: int, tokens: int) -> float:
        """Seconds in which the head reads so many tokens of plain rounds of each request."""
        whole, rest = divmod(tokens, PENDING_TOKENS)
        extend = self.costs.extend
        parts = (whole * extend.seconds(b, PENDING_TOKENS, keys), extend.seconds(b, rest, keys) if rest else 0.0)
        return sum(parts) * math.exp(self.speed)

    def phases(self, shape: Shape, b: int, keys: int) -> dict[str, float]:
        """The parts of what a round will take, by `PHASES`: corrected alike, since only whole rounds are timed."""
        lines = self._phase_lines.get((b, shape))
        if lines is None:
            lines = self._phase_lines[b, shape] = self.costs.phase_lines(shape, b)
        parts = [fixed + keys * per_key for fixed, per_key in lines]
        correction = self.seconds((shape,), b, keys)[shape] / sum(parts)
        return {name: part * correction for name, part in zip(PHASES, parts, strict=True)}

    def observe(self, shape: Shape, b: int, keys: int, seconds: float) -> None:
        """Learn from one served round; a time that is not positive and finite (a clock was set) counts for nothing."""
        if not seconds > 0 or math.isinf(seconds):
            return
        self._rounds += 1
        key = size_class(b), shape
        if self._served is None or key[0] != self._served[0]:
            self._before, self._of_size = None, 0
        elif key != self._served:
            self._before = self._served if self._of_size >= CHANGE_ROUNDS else None
            self._since_change = 0
        self._served = key
        self._of_size += 1
        self._since_change += 1
        error = math.log(seconds / self.seconds((shape,), b, keys)[shape])
        step = RATE * max(-LARGEST_ERROR, min(LARGEST_ERROR, error))
        self.speed += step
        if self._before is not None and self._since_change <= CHANGE_ROUNDS:
            self._add_error(key, step)
            self._add_error(self._before, -step)

    def knows_speed(self, b: int) -> bool:
        """Whether enough rounds of batches of about this size were timed just now to learn errors of shapes."""
        return self._served is not None and self._served[0] == size_class(b) and self._of_size >= CHANGE_ROUNDS

    def _error(self, key: tuple[int, Shape]) -> float:
        size, shape = key
        error, learned = self.errors.get(size, {}).get(shape, (0.0, 0))
        return error * FORGETTING ** (self._rounds - learned)

    def _add_error(self, key: tuple[int, Shape], step: float) -> None:
        size, shape = key
        self.errors.setdefault(size, {})[shape] = self._error(key) + step, self._rounds
