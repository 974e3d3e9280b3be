"""Predicts what a decode round costs from tables of measured seconds, corrected by the rounds that were served."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from eagle_plugin.core.shape import PLAIN, Levels, Shape
from eagle_plugin.policy.corrections import Corrections

# The phases of a round: the head's forwards that draft levels; the target's forward over the trees, with the walk; the
# head's forward over the accepted tokens, with the move of their keys; all else.
PHASES = ("draft", "verify", "extend", "fixed")
DEFERRED_TOKENS = 32  # tokens of plain rounds per request that the head reads in one forward
SPEED_ROUNDS = 8  # rounds of batches of one size class, after which the speed at this size is known


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

    def seconds(self, b: int, rows: int, prefix_tokens: int) -> float:
        """prefix_tokens: of all b requests together."""
        fixed, per_key = self.line(b, rows)
        return fixed + prefix_tokens * per_key

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
    levels: Levels = Levels.RECURRENT  # how the head drafts levels
    prompt_token: float = 0.0  # for the head to read one token of a prompt, where it does so only in order to draft
    plain: Forward | None = None  # the target's forward of a plain round, where it does not run as one over trees does
    draft: float = 0.0  # of every draft: what it takes without a forward of the head

    def round(self, shape: Shape, b: int, prefix_tokens: int) -> float:
        """Seconds of a round of b requests; prefix_tokens: of all of them together."""
        fixed, per_key = self.line(shape, b)
        return fixed + prefix_tokens * per_key

    def line(self, shape: Shape, b: int) -> tuple[float, float]:
        """Seconds of a round with empty prefixes, and seconds per token of the prefixes."""
        fixed, per_key = zip(*self.phase_lines(shape, b), strict=True)
        return sum(fixed), sum(per_key)

    def phase_lines(self, shape: Shape, b: int) -> tuple[tuple[float, float], ...]:
        """`line` of each of the `PHASES`. In a plain round the head does not run; it reads later, see `catch_up`."""
        rows, levels = self.levels.forwards(shape)
        parts = (
            (levels, self.level.line(b, rows), self.draft if shape != PLAIN else 0.0),
            (1.0, (self.plain if shape == PLAIN and self.plain else self.target).line(b, shape.width), 0.0),
            (shape != PLAIN, self.extend.line(b, shape.max_accept_length), 0.0),
            (1.0, (self.fixed, 0.0), 0.0),
        )
        return tuple((times * fixed + more, times * per_key) for times, (fixed, per_key), more in parts)


def rate(shape: Shape, tokens: float, seconds: float, reading: float) -> float:
    """Tokens per second of rounds of a shape, which take `seconds` for so many tokens.

    reading: seconds per output token in which the head reads prompts, if there are drafts.
    """
    return tokens / (seconds if shape == PLAIN else seconds + tokens * reading)


class CostModel:
    """`Costs`, corrected by the rounds that were served: at the speed of the machine now, with the tables' errors.

    All inputs are numbers of the host. Ranks that must choose alike share them.
    """

    # Tokens of plain rounds per request that the head reads at the latest when it has missed so many; 0: it need not.
    most_deferred = 0

    def __init__(self, costs: Costs, padded: Callable[[int, Shape], int] = lambda b, shape: b) -> None:
        """padded: requests of the padded batch that runs a round of b requests with trees of a shape."""
        self.costs, self._padded = costs, padded
        self.corrections = Corrections()
        self._size: int | None = None  # the class of the last batch
        self._of_size = 0  # rounds since batches were of another size class
        self._tables: dict[int, dict[Shape, tuple[float, float]]] = {}
        self._phase_lines: dict[tuple[int, Shape], tuple[tuple[float, float], ...]] = {}

    def forget_padding(self) -> None:
        """Ask `padded` again: other batch sizes may be captured now."""
        self._tables.clear()
        self._phase_lines.clear()

    @property
    def speed(self) -> float:
        """Log of measured over predicted seconds, of all shapes."""
        return self.corrections.speed

    def seconds(self, shapes: Iterable[Shape], b: int, prefix_tokens: int) -> dict[Shape, float]:
        """What a round of each shape will take at the present speed of the machine; a plain one with its share of what
        the head reads of plain rounds while none drafts, which is in no time that is observed."""
        errors = self.corrections.errors(size_class(b))
        found = {
            shape: self.tabled(shape, b, prefix_tokens) * math.exp(self.speed + errors.get(shape, 0.0))
            for shape in shapes
        }
        if self.most_deferred and PLAIN in found:
            found[PLAIN] += self.catch_up(b, prefix_tokens, self.most_deferred) / self.most_deferred
        return found

    def prompt_token(self) -> float:
        """Seconds that a token of a prompt costs because there are drafts."""
        return self.costs.prompt_token * math.exp(self.speed)

    def catch_up(self, b: int, prefix_tokens: int, tokens: int) -> float:
        """Seconds in which the head reads so many tokens of plain rounds of each request."""
        whole, rest = divmod(tokens, DEFERRED_TOKENS)
        extend = self.costs.extend
        parts = (
            whole * extend.seconds(b, DEFERRED_TOKENS, prefix_tokens),
            extend.seconds(b, rest, prefix_tokens) if rest else 0.0,
        )
        return sum(parts) * math.exp(self.speed)

    def phases(self, shape: Shape, b: int, prefix_tokens: int, correction: float | None = None) -> dict[str, float]:
        """The parts of what a round will take, by `PHASES`: corrected alike, since only whole rounds are timed.

        correction: None for that of a round now.
        """
        lines = self._phase_lines.get((b, shape))
        if lines is None:
            lines = self._phase_lines[b, shape] = self.costs.phase_lines(shape, self._padded(b, shape))
        times = self.correction(shape, b) if correction is None else correction
        return {
            name: times * (fixed + prefix_tokens * slope) for name, (fixed, slope) in zip(PHASES, lines, strict=True)
        }

    def correction(self, shape: Shape, b: int) -> float:
        """Expected over tabled seconds of a round."""
        return math.exp(self.speed + self.corrections.error(size_class(b), shape))

    def observe(self, shape: Shape, b: int, prefix_tokens: int, seconds: float) -> None:
        """Learn from one served round; a time that is not positive and finite (a clock was set) counts for nothing."""
        if not seconds > 0 or math.isinf(seconds):
            return
        size = size_class(b)
        self._of_size = self._of_size + 1 if size == self._size else 1
        self._size = size
        self.corrections.observe(size, shape, math.log(seconds / self.tabled(shape, b, prefix_tokens)))

    def doubt(self, b: int, shape: Shape, other: Shape) -> float:
        """How far the ratio of two shapes' seconds may be off: the standard deviation of its logarithm."""
        return self.corrections.doubt(size_class(b), shape, other)

    def knows_speed(self, b: int) -> bool:
        """Whether enough rounds of batches of about this size were timed just now to learn errors of shapes."""
        return self._size == size_class(b) and self._of_size >= SPEED_ROUNDS

    def tabled(self, shape: Shape, b: int, prefix_tokens: int) -> float:
        """What a round takes by the tables, without any correction."""
        table = self._tables.setdefault(b, {})
        fixed, per_key = table.get(shape) or table.setdefault(shape, self.costs.line(shape, self._padded(b, shape)))
        return fixed + prefix_tokens * per_key
