"""The shape of a decode round's draft trees. No torch here: the benchmark reads it too."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

MAX_WIDTH = 64  # nodes of a tree: the ancestors of a node are one 64-bit bitmask


class Shape(NamedTuple):
    """The caps of a draft tree; written "steps/topk/width" in flags and tables."""

    steps: int  # D: depth of the longest path below the root; 0 is plain decoding
    topk: int  # K: deterministic children per node, and nodes that the head reads per level
    width: int  # W: nodes that the target verifies, the root included

    @property
    def max_accept_length(self) -> int:
        """E: the most tokens that a round of this shape yields, the bonus token included."""
        return min(self.steps, self.width - 1) + 1

    @property
    def draft_slots(self) -> int:
        """Cache slots after the committed tokens that the levels of the draft write."""
        return max(self.steps - 1, 0) * self.topk

    @property
    def reach(self) -> int:
        """Cache slots after the committed tokens that a round of this shape writes."""
        return max(self.width, self.draft_slots, self.max_accept_length)

    @property
    def candidates(self) -> int:
        """Deterministic drafts of which the nodes are chosen."""
        return self.topk * (1 + self.draft_slots) if self.steps else 0

    def fault(self) -> str:
        """Why the plugin serves no tree with these caps, as one clause; "" where it does."""
        if self.steps < 1 or self.topk < 1 or self.width < 2:
            return "steps and topk have to be at least 1, and nodes at least 2"
        if self.width > MAX_WIDTH:
            return f"a tree has at most {MAX_WIDTH} nodes"
        if self.draft_slots > MAX_WIDTH:
            return f"(steps - 1) * topk is {self.draft_slots}, wanted at most {MAX_WIDTH}"
        return ""

    def within_steps(self, most: int | None) -> Shape:
        """The same caps with at most so many levels (None: any), and no more nodes than those have drafts for."""
        if most is None or most >= self.steps:
            return self
        shallow = self._replace(steps=most)
        return shallow._replace(width=min(self.width, shallow.candidates + 1))

    def within_drafts(self, most: int) -> Shape:
        """The same caps with at most so many drafted nodes; plain decoding for 0."""
        if most >= self.width - 1:
            return self
        return Shape(min(self.steps, most), min(self.topk, max(most, 1)), most + 1)

    @classmethod
    def chain(cls, length: int) -> Shape:
        """`length` draft tokens, one after the other."""
        return cls(length, 1, length + 1)

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.width}"


PLAIN = Shape(steps=0, topk=1, width=1)


class Levels(str, Enum):
    """How heads of a kind draft the levels of a tree; those without a block list the first as they read tokens."""

    RECURRENT = "recurrent"  # one forward per further level, over the K nodes of the level before
    PARALLEL = "parallel"  # one forward for all further levels, over a masked row for each
    BLOCK = "block"  # one forward for all levels, over a block of one length, as a round begins

    @property
    def depth_is_free(self) -> bool:
        """Whether a deeper draft takes no further forward of the head."""
        return self is not Levels.RECURRENT

    @property
    def without_forward(self) -> int:
        """Levels that a draft takes without a forward of the head."""
        return 0 if self is Levels.BLOCK else 1

    def forwards(self, shape: Shape) -> tuple[int, int]:
        """Rows per request of each forward of the head in a draft of this shape, and how many forwards.

        Every block has the same rows, which count as one.
        """
        deeper = max(shape.steps - self.without_forward, 0)
        if self is Levels.BLOCK:
            return 1, min(deeper, 1)
        return (deeper, min(deeper, 1)) if self.depth_is_free else (shape.topk, deeper)

    def draft_slots(self, shape: Shape) -> int:
        """Cache slots after the committed tokens that a draft of this shape writes: one per level of one forward."""
        return max(shape.steps - 1, 0) if self.depth_is_free else shape.draft_slots

    def one_forward(self, rows: int, topk: int) -> Shape:
        """A shape whose draft takes one forward of the head over so many rows per request; topk: its K, if it may be.

        `forwards` of it is (rows, 1).
        """
        return Shape(rows + 1, topk, topk + 1) if self.depth_is_free else Shape(2, rows, rows + 1)
