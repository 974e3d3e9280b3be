"""The shape of a decode round: how far and how wide it speculates."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The caps of one round's draft trees."""

    steps: int  # D: depth of the longest path below the root; 0 is plain decoding
    topk: int  # K: children of a node, and rows of a frontier
    width: int  # W: nodes that the target verifies, root included

    @property
    def stride(self) -> int:
        """E: the most tokens that a round of this shape can yield, the bonus token included."""
        return min(self.steps, self.width - 1) + 1

    @property
    def draft_slots(self) -> int:
        """Cache slots behind the committed length that the levels of the draft write."""
        return max(self.steps - 1, 0) * self.topk


PLAIN = Shape(steps=0, topk=1, width=1)
