"""Holds what a policy has seen and expects as plain numbers: engines write it, `eagle-plugin explain` reads it.

No torch here: the command reads reports without an engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.costs import rate
from eagle_plugin.policy.prediction_errors import CLASSES

VERSION = 1  # of the JSON form
MARK = "policy-report "  # before the JSON, at the end of a log line
NO_POLICY = "eagle-plugin: no policy, "  # before the reason, in the start-up line of a server without one


class ReportError(ValueError):
    """A text is not the JSON form of a report; the message says why."""


class ShapeTotals(NamedTuple):
    """What the rounds of one shape yielded since the server started."""

    rounds: int = 0  # of requests
    tokens: int = 0  # that they yielded, the bonus tokens included
    steps: int = 0  # rounds of batches
    # Of the steps whose time is known: those after one of the same shape and size class, with no prompt in them.
    timed: int = 0
    seconds: float = 0.0  # that they took
    predicted: float = 0.0  # that the policy expected

    def plus(self, **more: float) -> ShapeTotals:
        """These totals and more of some of them."""
        return self._replace(**{name: getattr(self, name) + value for name, value in more.items()})


class Expected(NamedTuple):
    """What the policy expects of a step with one shape."""

    seconds: float
    tokens: float  # per request, the bonus token included


class PolicyReport(NamedTuple):
    """What a server's policy has seen, and what it expects of the next step."""

    mode: str  # EAGLE_POLICY
    caps: Shape
    present: Shape  # its choice
    requests: int = 0  # of the latest step; 0 before the first one
    prefix_tokens: int = 0  # of all its requests
    slowdown: float = 1.0  # seconds of a step over those that were measured at the start; all shapes alike
    factors: tuple[float, ...] = ()  # accepted over predicted tokens, by depth from 1 on
    totals: Mapping[Shape, ShapeTotals] = {}
    expected: Mapping[Shape, Expected] = {}  # of every shape that may be chosen; empty without a policy or a step
    reading: float = 0.0  # seconds per output token in which the head reads prompts, if trees are drafted
    phases: Mapping[str, float] = {}  # of the predicted seconds of the timed steps, by `costs.PHASES`
    errors: tuple[int, ...] = ()  # the timed steps by the error of their prediction, see `prediction_errors`
    looked_up: tuple[int, ...] = ()  # nodes that only looked-up paths brought into trees, and the accepted ones of them

    def rates(self) -> dict[Shape, float]:
        """Expected tokens per second of the batch by shape, the best first."""
        rates = {
            shape: rate(shape, self.requests * tokens, seconds, self.reading)
            for shape, (seconds, tokens) in self.expected.items()
        }
        return dict(sorted(rates.items(), key=lambda item: -item[1]))

    def gain(self, shape: Shape) -> float:
        """Expected tokens per second of a shape over those of plain decoding."""
        rates = self.rates()
        return rates[shape] / rates[PLAIN]

    def next_best(self) -> Shape | None:
        """The best shape but the present one."""
        return next((shape for shape in self.rates() if shape != self.present), None)

    def as_json(self) -> str:
        """One line; numbers have six digits."""
        return json.dumps(
            {
                "version": VERSION,
                "mode": self.mode,
                "caps": str(self.caps),
                "present": str(self.present),
                "requests": self.requests,
                "prefix_tokens": self.prefix_tokens,
                "slowdown": _short(self.slowdown),
                "factors": list(map(_short, self.factors)),
                "totals": _rows(self.totals),
                "expected": _rows(self.expected),
                "reading": _short(self.reading),
                "phases": {name: _short(seconds) for name, seconds in self.phases.items()},
                "errors": self.errors,
                "looked_up": self.looked_up,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> PolicyReport:
        """The report of such a line. Raises ReportError."""
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise ReportError(f"its version is {found['version']!r}, wanted {VERSION}")
            return cls(
                mode=str(found["mode"]),
                caps=shape_of(found["caps"]),
                present=shape_of(found["present"]),
                requests=int(_number(found["requests"])),
                prefix_tokens=int(_number(found["prefix_tokens"])),
                slowdown=_positive(found["slowdown"]),
                factors=tuple(map(_number, found["factors"])),
                totals={shape_of(name): _totals(row) for name, row in found["totals"].items()},
                expected={shape_of(name): Expected(*map(_positive, row)) for name, row in found["expected"].items()},
                reading=_number(found.get("reading", 0.0)),
                phases={str(name): _number(seconds) for name, seconds in found.get("phases", {}).items()},
                errors=_classes(found.get("errors", [])),
                looked_up=tuple(int(_number(count)) for count in found.get("looked_up", [])),
            )
        except ReportError:
            raise
        except KeyError as error:
            raise ReportError(f"it has no {error}") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ReportError(f"{type(error).__name__}: {str(error)[:80]}") from error


def shape_of(text: str) -> Shape:
    """The shape of "steps/topk/width". Raises ValueError."""
    steps, topk, width = map(int, text.split("/"))
    return Shape(steps, topk, width)


def difference(now: Mapping[Shape, ShapeTotals], before: Mapping[Shape, ShapeTotals]) -> dict[Shape, ShapeTotals]:
    """What was added to totals, of the shapes that had rounds in between."""
    added = {}
    for shape, totals in now.items():
        old = before.get(shape, ShapeTotals())._asdict()
        added[shape] = totals.plus(**{name: -value for name, value in old.items()})
    return {shape: totals for shape, totals in added.items() if any(totals)}


def sum_of(totals: Iterable[ShapeTotals]) -> ShapeTotals:
    """The totals of all these shapes together."""
    together = ShapeTotals()
    for one in totals:
        together = together.plus(**one._asdict())
    return together


def accept_length(totals: Mapping[Shape, ShapeTotals]) -> float | None:
    """Tokens per round that drafted, the bonus token included; None where none did."""
    drafted = sum_of(x for shape, x in totals.items() if shape != PLAIN)
    return drafted.tokens / drafted.rounds if drafted.rounds else None


def tokens_per_second(totals: Mapping[Shape, ShapeTotals]) -> float | None:
    """Tokens per second of decode steps; a step without a known time takes the mean of its shape.

    None where no step of any shape has a known time.
    """
    known = [x for x in totals.values() if x.timed and x.steps]
    seconds = sum(x.seconds / x.timed * x.steps for x in known)
    return sum(x.tokens for x in known) / seconds if seconds > 0 else None


def present_choice(report: PolicyReport) -> str:
    """The shape that the policy has chosen, what it expects of it, and of the next best one."""
    if report.present not in report.expected:
        return f"now {name_of(report.present)}"
    text = f"now {name_of(report.present)} for {report.requests} request{'s' if report.requests != 1 else ''}"
    if report.present != PLAIN:
        text += f", expected {report.gain(report.present):.2f}x of plain decoding"
    other = report.next_best()
    return text if other is None else f"{text}, next best {name_of(other)} with {report.gain(other):.2f}x"


def name_of(shape: Shape) -> str:
    """A shape as sentences name it."""
    return "plain" if shape == PLAIN else str(shape)


def _rows(of_shapes: Mapping[Shape, tuple[float, ...]]) -> dict[str, list[float]]:
    return {str(shape): list(map(_short, row)) for shape, row in of_shapes.items()}


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _totals(row: Any) -> ShapeTotals:
    rounds, tokens, steps, timed, seconds, predicted = map(_number, row)
    return ShapeTotals(int(rounds), int(tokens), int(steps), int(timed), seconds, predicted)


def _classes(row: Any) -> tuple[int, ...]:
    if len(row) not in (0, CLASSES):
        raise ReportError(f"errors has {len(row)} classes, wanted {CLASSES}")
    return tuple(int(_number(count)) for count in row)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ReportError(f"{value!r} is no number from 0 on")
    return float(value)


def _positive(value: Any) -> float:
    if not _number(value) > 0:
        raise ReportError(f"{value!r} is not positive")
    return float(value)
