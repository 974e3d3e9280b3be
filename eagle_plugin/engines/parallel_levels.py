"""All levels of a draft from one forward of the head over masked rows (P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import Frontier, chain_ancestors
from eagle_plugin.engines.round import HeadForward, HeadState, LevelRows, LevelSource, RecurrentLevels, TopM


class MaskRow(NamedTuple):
    """What a masked row reads in place of a token and its features."""

    token: int  # id of the target
    hidden: Tensor  # [1, H]: the features of a mask, through the head's norms and fc


class ParallelLevels:
    """A `LevelSource` whose levels depend on the root alone: all nodes of a level have the same likely children.

    Level 1 is what the head listed after the last accepted token. The masked rows come after it, at the positions
    L .. L + D - 2 of the head; row j sees all tokens before and the rows 0 .. j, and lists the tokens of level j + 2.
    They run at the beginning of a draft, and not after the accepted rows of the round before: so they are as many as
    this round needs, their slots are among those that a round reserves for its levels, and a prefill or the reading of
    many tokens at once needs nothing more. Their keys stay in slots after L, which the next round overwrites.
    """

    def __init__(
        self, shape: Shape, state: HeadState, lengths: Tensor, top_m: int, mask: MaskRow, forward: HeadForward
    ) -> None:
        """lengths [b] int64 is L of each request; top_m is how many tokens to list per level."""
        self._rows, self._top_m = shape.steps - 1, top_m
        self._root, self._lengths = state.top, lengths
        self._mask, self._forward = mask, forward
        self._levels: TopM | None = None  # [b, D - 1, M]

    def root(self) -> TopM:
        """The tokens that the head listed after the last accepted token."""
        return self._root

    def children(self, level: int, frontier: Frontier) -> TopM:
        """The tokens of this level, once per node of the frontier."""
        levels = self._levels = self._levels or self._read_masks()
        nodes = frontier.tokens.shape[1]
        return TopM(*(values[:, level - 2].repeat_interleave(nodes, dim=0) for values in levels))

    def _read_masks(self) -> TopM:
        b, rows, device = len(self._lengths), self._rows, self._lengths.device
        places = torch.arange(rows, device=device)
        logits, _ = self._forward(
            LevelRows(
                tokens=torch.full((b * rows,), self._mask.token, dtype=torch.int64, device=device),
                positions=(self._lengths[:, None] + places).view(-1),
                # A copy per row: an engine's layers may add to it in place.
                hidden=self._mask.hidden.repeat(b * rows, 1),
                ancestors=chain_ancestors(rows, device).repeat(b, 1),
                first_slot=0,
            )
        )
        return TopM(*(values.view(b, rows, -1) for values in TopM.of(logits, self._top_m)))


def levels_of(
    mask: MaskRow | None, shape: Shape, state: HeadState, lengths: Tensor, top_m: int, forward: HeadForward
) -> LevelSource:
    """The levels of a head: from one forward over masked rows where it has a mask, else from one forward per level."""
    if mask is None:
        return RecurrentLevels(shape, state, lengths, top_m, forward)
    return ParallelLevels(shape, state, lengths, top_m, mask, forward)
