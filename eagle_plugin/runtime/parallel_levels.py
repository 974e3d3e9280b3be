"""All levels of a draft from one forward of the head over masked rows (P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.runtime.round import HeadForward, HeadState, LevelRows, LevelSource, RecurrentLevels, TopM


class MaskRow(NamedTuple):
    """What a masked row reads in place of a token and its features."""

    token: int  # id of the target
    hidden: Tensor  # [1, H]: the features of a mask, through the head's norms and fc


def levels_of(
    mask: MaskRow | None, shape: Shape, state: HeadState, lengths: Tensor, top_m: int, forward: HeadForward
) -> LevelSource | TopM:
    """The levels of a head without a mask: one forward per level; else the lists of all levels, [b, D, M].

    lengths [b] int64 is L of each request; top_m is how many tokens to list per level.
    """
    if mask is None:
        return RecurrentLevels(shape, state, lengths, top_m, forward)
    if state.top.logp.dim() == 3:
        return state.top
    root = TopM(*(values[:, None, :top_m] for values in state.top))
    if shape.steps == 1:
        return root
    deeper = masked_levels(shape.steps - 1, lengths, top_m, mask, forward)
    return TopM(*(torch.cat(values, dim=1) for values in zip(root, deeper, strict=True)))


def masked_levels(rows: int, lengths: Tensor, top_m: int, mask: MaskRow, forward: HeadForward) -> TopM:
    """The lists [b, rows, M] of the levels 2 .. rows + 1, whatever is drafted above them.

    Level 1 is what the head listed after the last accepted token. The masked rows come after it, at the positions
    L .. L + rows - 1 of the head; row j sees all tokens before and the rows 0 .. j, and lists the tokens of level
    j + 2. Their keys stay in slots after L, which the next round overwrites.
    """
    b, device = len(lengths), lengths.device
    logits, _ = forward(
        LevelRows(
            tokens=torch.full((b * rows,), mask.token, dtype=torch.int64, device=device),
            positions=(lengths[:, None] + torch.arange(rows, device=device)).view(-1),
            # A copy per row: an engine's layers may add to it in place.
            hidden=mask.hidden.repeat(b * rows, 1),
            ancestors=chain_ancestors(rows, device).repeat(b, 1),
            first_slot=0,
        )
    )
    return TopM(*(values.view(b, rows, -1) for values in TopM.of(logits, top_m)))
