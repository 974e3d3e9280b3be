"""The part of the draft vocabulary over which lm_head learns from some rows: a sampled softmax.

The softmax over all D draft tokens is most of what a small head costs in training. With fewer columns every chunk of
target rows chooses its own: those that the target finds most probable there, and for the others a uniform sample, each
of whose columns counts as often as it stands for columns (Jean et al., arXiv 1412.2007, with the target's distribution
in place of the tokens of the batch). So with w(v) = 1 for the chosen and the share's inverse for the sampled,

    sum_{v in D} f(v)  ~  sum_{v in columns} w(v) f(v)

has the right expectation, for the partition sum of the head as for the target's mass. The logarithm of the estimated
partition sum is biased, less with more columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLED_SHARE = 4  # one of so many columns is sampled


class Columns:
    """The columns of one chunk."""

    def __init__(self, mass: Tensor, count: int, generator: torch.Generator) -> None:
        """mass [D]: the target's probability of each draft token, summed over the rows; count: columns, below D."""
        size, sampled = len(mass), count // SAMPLED_SHARE
        self.certain = count - sampled
        draw = torch.rand(size, generator=generator).to(mass.device)
        best = mass.topk(self.certain, sorted=False).indices
        rest = draw.index_fill_(0, best, -1.0).topk(sampled, sorted=False).indices
        self.ids = torch.cat([best, rest])  # [C] int64
        self.weight = torch.ones(count, dtype=mass.dtype, device=mass.device)  # [C]
        if sampled:
            self.weight[self.certain :] = (size - self.certain) / sampled
        self.log_weight = self.weight.log()

    def take(self, p: Tensor) -> Tensor:
        """Probabilities [R, D] of these columns [R, C], times the columns' weights."""
        return p.index_select(1, self.ids).mul_(self.weight)
