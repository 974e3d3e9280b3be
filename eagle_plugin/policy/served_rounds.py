"""What is known of a round of drafts: when it is launched, and what it yielded."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple, Protocol

from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.path_sums import PathSums


class Scored(Protocol):
    """What a round drafted, as far as the policy reads it."""

    @property
    def scores(self) -> Tensor | None:
        """The candidate table's scores [b, C] float32; None where they tell nothing of the head."""


class ServedRound(NamedTuple):
    """What is known of a round when it is launched; its results come later."""

    shape: Shape
    b: int
    prefix_tokens: int  # tokens of the prefixes of all requests
    sums: Tensor | None = None  # [J, b, D] float32, on its way to the host
    path_sums: PathSums | None = None
    drafting: Sequence[int] | None = None  # places of the requests that have drafts; None: all


TimedRound = tuple[ServedRound, float]  # its seconds


class Result(NamedTuple):
    """What a round yielded."""

    served: ServedRound
    sums: dict[Shape, list[float]] | None  # `PathSums.by_shape`
    kept: Sequence[int]  # accepted draft tokens of each request
    drafted: Sequence[int]  # the same of those that had drafts


def add_to(totals: dict[Shape, list[float]], shape: Shape, more: Sequence[float]) -> None:
    """Add to the totals of a shape; more: in the order of `ShapeTotals`."""
    found = totals.get(shape)
    totals[shape] = list(more) if found is None else list(map(add, found, more))


def yields_of(result: Result) -> Sequence[float]:
    """What a round adds to the totals of its shape, in the order of `ShapeTotals`."""
    kept = result.kept
    return len(kept), len(kept) + sum(kept), 1, 0, 0.0, 0.0
