"""Statistics of accept lengths: per position, with bootstrap intervals over prompts, and compared between heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

RESAMPLES = 2000
LEVEL = 0.95


class AcceptCounts(NamedTuple):
    """How many drafts of one prompt's response were accepted in one way of drafting."""

    domain: str
    rounds: float  # rounds of a walk, or contexts; 0 where the response is too short for one
    accepted: Tensor  # [steps] float64: in how many of them k drafts or more were accepted, k = 1..steps


class AcceptStats(NamedTuple):
    """The accept length of a head, the bonus token included, and the acceptance of each position."""

    accept_length: float  # 1 + the mean of accepted drafts
    low: float  # of the interval that holds 95 % of the means over bootstrap samples of the prompts
    high: float
    cumulative: list[float]  # P(k drafts or more are accepted), k = 1..steps
    conditional: list[float]  # P(the k-th is accepted | all before it were): the n-alpha of the papers
    prompts: int
    rounds: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers with four decimals."""
        values = self._asdict() | {"drafts_accepted": self.accept_length - 1}
        return {
            name: [round(x, 4) for x in value] if isinstance(value, list) else round(value, 4)
            for name, value in values.items()
        }


def summarize(counts: Sequence[AcceptCounts]) -> AcceptStats | None:
    """The statistics of one way of drafting over some prompts; None without a single round."""
    accepted, rounds = _stack(counts)
    if not float(rounds.sum()):
        return None
    cumulative = (accepted.sum(0) / rounds.sum()).tolist()
    before = [1.0, *cumulative[:-1]]
    low, high = _interval(_resampled_lengths(accepted, rounds))
    return AcceptStats(
        1 + sum(cumulative),
        low,
        high,
        cumulative,
        [a / b if b else 0.0 for a, b in zip(cumulative, before, strict=True)],
        int((rounds > 0).sum()),
        float(rounds.sum()),
    )


def gain(counts: Sequence[AcceptCounts], base: Sequence[AcceptCounts]) -> tuple[float, float, float]:
    """How much longer the accept length is than that of `base` on the same prompts: ratio - 1 with its interval."""
    new, old = _stack(counts), _stack(base)
    low, high = _interval(_resampled_lengths(*new) / _resampled_lengths(*old))
    lengths = [1 + float(accepted.sum() / rounds.sum()) for accepted, rounds in (new, old)]
    return lengths[0] / lengths[1] - 1, low - 1, high - 1


def paired_difference(new: Tensor, old: Tensor) -> tuple[float, float, float]:
    """The mean of new - old with its interval; each [prompts] float, one value per prompt."""
    differences = (new - old).double()
    means = differences[_resamples(len(differences))].mean(1)
    return float(differences.mean()), *_interval(means)


def _stack(counts: Sequence[AcceptCounts]) -> tuple[Tensor, Tensor]:
    accepted = torch.stack([count.accepted for count in counts])
    return accepted, torch.tensor([count.rounds for count in counts], dtype=torch.float64)


def _resampled_lengths(accepted: Tensor, rounds: Tensor) -> Tensor:
    """Accept lengths [RESAMPLES] of prompts drawn with replacement."""
    picks = _resamples(len(rounds))
    return 1 + accepted.sum(1)[picks].sum(1) / rounds[picks].sum(1).clamp(min=1e-9)


def _resamples(prompts: int) -> Tensor:
    """Which prompts each resample takes [RESAMPLES, prompts]; always the same, so that heads are compared on them."""
    return torch.randint(prompts, (RESAMPLES, prompts), generator=torch.Generator().manual_seed(0))


def _interval(values: Tensor) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
