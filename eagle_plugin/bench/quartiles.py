"""Summarises the repeats of a measurement: medians with quartiles, and ratios that are taken repeat by repeat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

DIGITS = 3  # after the point, in documents


class Strict(BaseModel):
    """A part of a document; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class Quartiles(Strict):
    """First quartile, median and third quartile over the repeats."""

    q1: float
    median: float
    q3: float

    @property
    def relative_width(self) -> float:
        """The distance between the quartiles as a part of the median."""
        return (self.q3 - self.q1) / self.median


def quartiles(values: Sequence[float], digits: int = DIGITS) -> Quartiles:
    """Median and quartiles (inclusive method) of at least one value. ValueError without one."""
    if not values:
        raise ValueError("no values to summarise; run at least one repeat")
    parts = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    q1, median, q3 = (round(part, digits) for part in parts)
    return Quartiles(q1=q1, median=median, q3=q3)


def ratio_quartiles(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles:
    """Quartiles of ours / theirs per repeat: a slow minute of the machine then changes both sides of a ratio."""
    if len(ours) != len(theirs):
        raise ValueError(f"ratios need the same repeats on both sides, found {len(ours)} and {len(theirs)}")
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
