"""What a comparison shows: a ratio with its interval, and a sentence that does not say more than they do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

Finding = Literal["more", "fewer", "no difference", "unknown"]
LEVEL = 0.95
# Quantiles 0.975 of Student's t distribution with 1, 2, ... degrees of freedom; scipy.stats.t.ppf(0.975, n) gives the
# same, and vLLM's environment has no scipy. The last one serves for more, which makes an interval slightly too wide.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Ratio(NamedTuple):
    """A ratio of output throughputs, and the interval that holds the true one with 95 % confidence."""

    ratio: float
    low: float | None  # None: one repeat alone has no interval
    high: float | None

    @property
    def finding(self) -> Finding:
        """What the interval shows: a side of 1 on which all of it is, or no difference."""
        if self.low is None or self.high is None:
            return "unknown"
        return "more" if self.low > 1 else "fewer" if self.high < 1 else "no difference"

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f}"
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_with_interval(repeats: Sequence[Sequence[float]]) -> Ratio:
    """The geometric mean of ratios, with Student's interval over the repeats.

    Args:
        repeats: of each repeat the ratios of its cells, all above 0. All servers ran within minutes on the same
            questions, so that a ratio compares like with like; the repeats ask other questions and are taken as
            independent.

    Raises:
        ValueError: no repeat, or a repeat without a ratio.
    """
    if not repeats or not all(repeats):
        raise ValueError("a ratio needs at least one cell that was measured with both states; run with --resume")
    logs = [statistics.fmean(math.log(value) for value in repeat) for repeat in repeats]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None)
    quantile = T_QUANTILES[min(len(logs) - 2, len(T_QUANTILES) - 1)]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def describe(ratio: Ratio, ours: str, theirs: str) -> str:
    """The comparison as a clause without its end, for example "the trained head serves 1.20 times ..."."""
    if ratio.finding == "unknown":
        return (
            f"one repeat cannot show whether {ours} differs from {theirs}: it served {ratio.ratio:.2f} times as many "
            "output tokens per second"
        )
    interval = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.finding == "no difference":
        return (
            f"there is no difference that this can show between {ours} and {theirs}: {ratio.ratio:.2f} times as many "
            f"output tokens per second ({interval})"
        )
    if ratio.finding == "more":
        return f"{ours} serves {ratio.ratio:.2f} times as many output tokens per second as {theirs} ({interval})"
    return f"{ours} serves fewer output tokens per second than {theirs}: {ratio.ratio:.2f} times as many ({interval})"


def sentence(clauses: Sequence[str], where: str) -> str:
    """One sentence of the clauses, and where they hold."""
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}; {where}."
