"""How a loaded head drafts the levels of a tree: what serving asks of the kind of a head, in one place.

A P-EAGLE head (arXiv 2602.01469) drafts all levels after the first in one forward over masked rows, a block drafter
(DFlash) all levels in one forward over a block, the others draft one level after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.core.tree import chain_ancestors
from eagle_plugin.runtime.round import HeadForward, HeadState, LevelRows, LevelSource, RecurrentLevels, TopM


class MaskRow(NamedTuple):
    """What a masked row reads in place of a token and its features."""

    token: int  # id of the target
    hidden: Tensor  # [1, H]: the features of a mask, through the head's norms and fc


class MaskedRows(NamedTuple):
    """The masked rows of a request in a draft of one shape."""

    mask: MaskRow
    rows: int  # at least 1


class Block(NamedTuple):
    """What a block drafter reads after the accepted tokens: the root token, then masks, which list a level each.

    It always reads the whole block, because each row sees all of them.
    """

    mask: int  # the token of the masks
    rows: int  # of the block, the root's included: 2 or more


class BlockRows(NamedTuple):
    """The rows of a block per request, R of them."""

    tokens: Tensor  # [b, R] int32: the root token, then masks
    positions: Tensor  # [b, R] int64: L .. L + R - 1
    ancestors: Tensor  # [b, R] int64, as in `TreeRows`: all rows see each other, or those before them only

    @classmethod
    def of(cls, block: Block, roots: Tensor, lengths: Tensor, is_causal: bool) -> BlockRows:
        """roots [b]: the last accepted tokens, which have no keys yet; lengths [b] int64: L."""
        (mask, rows), b, device = block, len(roots), roots.device
        tokens = torch.full((b, rows), mask, dtype=torch.int32, device=device)
        tokens[:, 0] = roots
        seen = chain_ancestors(rows, device)
        seen = seen if is_causal else seen[-1:].expand(rows)
        return cls(tokens, lengths[:, None] + torch.arange(rows, device=device), seen.repeat(b, 1))


class HeadLevels(NamedTuple):
    """How a head drafts levels; mask: of a head that drafts them over masked rows; block: of a block drafter."""

    mask: MaskRow | None = None
    block: Block | None = None
    in_draft: bool = False  # whether the block is read as a round begins, and not after the accepted tokens

    @property
    def kind(self) -> Levels:
        """Which says how many forwards of how many rows there are in a draft."""
        if self.in_draft:
            return Levels.BLOCK
        return Levels.RECURRENT if self.mask is None and self.block is None else Levels.PARALLEL

    def masked_rows(self, shape: Shape) -> MaskedRows | None:
        """The masked rows of each request in a draft of this shape; None without any."""
        return None if self.mask is None or shape.steps < 2 else MaskedRows(self.mask, shape.steps - 1)

    def source(
        self, shape: Shape, state: HeadState, lengths: Tensor, top_m: int, forward: HeadForward
    ) -> LevelSource | TopM:
        """Where a draft takes its levels from: a source level by level, or the lists of all levels [b, D, M].

        lengths [b] int64 is L of each request; top_m is how many tokens to list per level. The lists of `state` may
        have more levels or tokens.
        """
        if self.kind is Levels.RECURRENT:
            return RecurrentLevels(shape, state, lengths, top_m, forward)
        if state.top.logp.dim() == 3:  # perhaps more levels than this draft has
            return TopM(*(values[:, : shape.steps].contiguous() for values in state.top))
        root = TopM(*(values[:, None, :top_m] for values in state.top))
        masked = self.masked_rows(shape)
        if masked is None:
            return root
        deeper = masked_levels(masked, lengths, top_m, forward)
        return TopM(*(torch.cat(values, dim=1) for values in zip(root, deeper, strict=True)))


def block_of(levels: HeadLevels) -> Block:
    """The block of a block drafter."""
    assert levels.block is not None
    return levels.block


def block_levels(states: Tensor, steps: int, top_m: int, logits_of: Callable[[Tensor], Tensor]) -> TopM:
    """The lists [b, steps, M] of a block's first levels, from the head's states [b, R, H] of its rows.

    logits_of: of states [b * steps, H].
    """
    b = len(states)
    top = TopM.of(logits_of(states[:, 1 : 1 + steps].flatten(0, 1)), top_m)
    return TopM(*(values.view(b, steps, -1) for values in top))


def masked_levels(masked: MaskedRows, lengths: Tensor, top_m: int, forward: HeadForward) -> TopM:
    """The lists [b, rows, M] of the levels 2 .. rows + 1 of so many masked rows, whatever is drafted above them.

    Level 1 is what the head listed after the last accepted token. The masked rows come after it, at the positions
    L .. L + rows - 1 of the head; row j sees all tokens before and the rows 0 .. j, and lists the tokens of level
    j + 2. Their keys stay in slots after L, which the next round overwrites.
    """
    (mask, rows), b, device = masked, len(lengths), lengths.device
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
