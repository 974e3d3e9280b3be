"""Synthetic acceptance, for benchmarks: the count of drafts that are accepted in a round is drawn from given rates.

The text means nothing then. The cost of a round is real: a path of the drafted tree is accepted, so that keys and
values are moved, and the head reads tokens, as in any other round.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted

Rates = tuple[float, ...]  # entry i: the probability that the first i + 1 drafted tokens are accepted
UNIFORMS = 2  # per request and round


class SyntheticRates(NamedTuple):
    """The rates of each shape."""

    of_shapes: tuple[tuple[Shape, Rates], ...]
    otherwise: Rates = ()  # of a shape that contains none of these

    def of(self, shape: Shape) -> Rates:
        """The rates of trees of a shape: of the largest of the shapes that it contains, itself first."""
        inside = [(known.width, known, rates) for known, rates in self.of_shapes if _contains(shape, known)]
        return max(inside)[2] if inside else self.otherwise


def _contains(shape: Shape, other: Shape) -> bool:
    return all(a >= b for a, b in zip(shape, other, strict=True))


def rates_of_length(length: float, steps: int) -> Rates:
    """Rates with this mean accept length, in [1, steps + 1]: always the whole number below it, or one more."""
    accepted = min(max(length - 1, 0.0), float(steps))
    return tuple(min(max(accepted - depth, 0.0), 1.0) for depth in range(steps))


def rates_of_normal(mean: float, steps: int) -> Rates:
    """Rates of an accept length that is normal with a standard deviation of 1, rounded, and kept in 1 .. steps + 1."""
    return tuple(math.erfc((depth + 1.5 - mean) / math.sqrt(2)) / 2 for depth in range(steps))


def keys_of_trees(tree: DraftTree) -> Tensor:
    """Keys [b] int64 of requests that have none because all are greedy: of their places in the batch and their trees.

    Ranks of tensor parallelism have the same trees, so they have the same keys.
    """
    places = torch.arange(len(tree.tokens), device=tree.tokens.device)
    return (places << 32) + tree.tokens.sum(dim=1)


def accept_synthetic(
    tree: DraftTree, logits: Tensor, rates: Rates, uniforms: Tensor, max_accept_length: int
) -> Accepted:
    """Accept a path of each tree whose length is drawn from the rates; the token after it is the target's most likely.

    tree of [b, W] nodes; logits [b * W, V]; uniforms [b, 2] float64: the first number draws the length, the second one
    of the nodes at that depth, all equally likely. A tree that is less deep gives one of its deepest paths. No value is
    read by the host.
    """
    b, width = tree.tokens.shape
    device, longest = tree.tokens.device, max_accept_length
    nodes = torch.arange(width, device=device)
    depths = tree.depths.long()
    # One number for all depths: the rates do not increase, so it is below the i-th with that probability.
    length = torch.zeros(b, dtype=torch.int64, device=device)
    for rate in rates[: longest - 1]:
        length += uniforms[:, 0] < rate
    length = torch.minimum(length, depths.amax(dim=1))
    # Padding has the depth of the root, which comes first.
    ends = depths == length[:, None]
    place = (uniforms[:, 1] * ends.sum(dim=1) * (length > 0)).long()  # of the last node among those of its depth
    last = (ends & (ends.cumsum(dim=1) == place[:, None] + 1)).int().argmax(dim=1)
    is_on_path = tree.ancestors.gather(1, last[:, None]) >> nodes & 1 == 1
    # Nodes that are not on the path go to a column that is dropped.
    index = torch.full((b, longest + 1), -1, dtype=torch.int32, device=device)
    index.scatter_(1, depths.where(is_on_path, longest), nodes.int().expand(b, width))
    tokens = torch.zeros(b, longest + 1, dtype=torch.int64, device=device)
    tokens.scatter_(1, (depths - 1).where(is_on_path & (depths > 0), longest), tree.tokens)
    after = logits[last + torch.arange(b, device=device) * width].argmax(dim=1)
    tokens.scatter_(1, length[:, None], after[:, None])
    return Accepted(index[:, :longest].contiguous(), (length + 1).int(), tokens[:, :longest].contiguous())
