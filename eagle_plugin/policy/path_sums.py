"""Sums the path scores of the trees that a round could have drafted, for `policy.survival`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape


class PathSums:
    """The sums of every shape that the candidates of one drafted shape cover: no deeper, no more children per node.

    Such a tree is taken to have its best nodes among those candidates that are one of the first K children of one of
    the first K nodes of a level, or a step of a looked-up path.
    """

    def __init__(
        self, drafted: Shape, shapes: Sequence[Shape], device: torch.device | str, candidates: int | None = None
    ) -> None:
        """candidates: of the table, if it has more than the head's: a place for each step of a looked-up path."""
        self.shapes = [shape for shape in shapes if shape.steps <= drafted.steps and shape.topk <= drafted.topk]
        rows = torch.arange(1 + drafted.draft_slots).repeat_interleave(drafted.topk)  # proposing node of each candidate
        level_row = torch.where(rows == 0, 0, (rows - 1) % drafted.topk)  # its place in its level
        depths = torch.where(rows == 0, 1, (rows - 1) // drafted.topk + 2)
        child = torch.arange(drafted.topk).repeat(1 + drafted.draft_slots)
        looked_up = torch.arange(0 if candidates is None else candidates - drafted.candidates)
        none = torch.zeros_like(looked_up)
        depths, level_row, child = map(torch.cat, ((depths, looked_up + 1), (level_row, none), (child, none)))
        steps, topk, width = (torch.tensor(caps)[:, None] for caps in zip(*self.shapes, strict=True))
        self._possible = ((child < topk) & (level_row < topk) & (depths <= steps)).to(device)  # [J, C]
        self._nodes = (width - 1)[:, :, None].to(device)  # [J, 1, 1]
        self._at_depth = (depths[:, None] == torch.arange(1, drafted.steps + 1)).float().to(device)  # [C, D]

    def __call__(self, scores: Tensor) -> Tensor:
        """The sums [J, b, D] float32 of every request; scores [b, C] float32 are those of the candidate table."""
        return (scores.exp() * self.nodes(scores)) @ self._at_depth

    def nodes(self, scores: Tensor) -> Tensor:
        """The candidates that each tree has, [J, b, C] bool."""
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        possible = self._possible[:, order]  # [J, b, C], best first
        kept = possible & (possible.cumsum(dim=-1) <= self._nodes)
        return torch.zeros_like(kept).scatter(-1, order.expand_as(kept), kept)

    def by_shape(self, sums: Tensor, places: Sequence[int] | None = None) -> dict[Shape, list[float]]:
        """Means over the requests of sums [J, b, D] on the host, by depth 1 .. steps of each shape.

        places: of the requests that count, at least one; None: all.
        """
        # The host's part of a round: torch, and numpy's mean, take longer for so few values.
        values = sums.numpy()
        if places is not None:
            values = values[:, places]
        means = (np.add.reduce(values, axis=1) / values.shape[1]).tolist()
        return {shape: values[: shape.steps] for shape, values in zip(self.shapes, means, strict=True)}
