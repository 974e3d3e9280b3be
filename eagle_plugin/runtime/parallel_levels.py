"""How a loaded head drafts the levels of a tree: what serving asks of the kind of a head, in one place.

A P-EAGLE head (arXiv 2602.01469) drafts all levels after the first in one forward over masked rows, a block drafter
(DFlash) all levels in one forward over a block, the others draft one level after the other. Of a block drafter with a
Markov head (DSpark) the forward gives a state per level, and each node's list depends on its own token too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.core.tree import Frontier, chain_ancestors
from eagle_plugin.heads.block_config import first_row, levels_of_block, mask_token_of
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
    rows: int  # of the block, the root's included
    first: int = 1  # the row that lists level 1: the first mask's, or 0, the root's own

    @classmethod
    def of(cls, config: dict[str, Any], draft_tokens: int) -> Block:
        """That of a drafter with this config.json where a round drafts so many tokens.

        It has a row per drafted token, and one for the root where that lists nothing, as the engines' own drafting has,
        but no more than the drafter was trained for: wider trees need no longer block.
        """
        first = first_row(config)
        return cls(mask_token_of(config), first + levels_of_block(config, draft_tokens), first)


class BlockRows(NamedTuple):
    """The rows of a block per request, R of them."""

    tokens: Tensor  # [b, R] int32: the root token, then masks
    positions: Tensor  # [b, R] int64: L .. L + R - 1
    ancestors: Tensor  # [b, R] int64, as in `TreeRows`: all rows see each other, or those before them only

    @classmethod
    def of(cls, block: Block, roots: Tensor, lengths: Tensor, is_causal: bool) -> BlockRows:
        """roots [b]: the last accepted tokens, which have no keys yet; lengths [b] int64: L."""
        (mask, rows, _), b, device = block, len(roots), roots.device
        tokens = torch.full((b, rows), mask, dtype=torch.int32, device=device)
        tokens[:, 0] = roots
        seen = chain_ancestors(rows, device)
        seen = seen if is_causal else seen[-1:].expand(rows)
        return cls(tokens, lengths[:, None] + torch.arange(rows, device=device), seen.repeat(b, 1))


class LogitsAfter(Protocol):
    """The logits [b, F, V] of the children of F nodes with these tokens [b, F] int64 of the target, from the states
    [b, H] of their level's rows: a Markov head's bias by the token is in them."""

    def __call__(self, states: Tensor, tokens: Tensor) -> Tensor: ...


class HeadLevels(NamedTuple):
    """How a head drafts levels; mask: of a head that drafts them over masked rows; block: of a block drafter."""

    mask: MaskRow | None = None
    block: Block | None = None
    in_draft: bool = False  # whether the block is read as a round begins, and not after the accepted tokens
    after: LogitsAfter | None = None  # of a block drafter with a Markov head

    @property
    def kind(self) -> Levels:
        """Which says how many forwards of how many rows there are in a draft."""
        if self.in_draft:
            return Levels.BLOCK
        return Levels.RECURRENT if self.mask is None and self.block is None else Levels.PARALLEL

    @property
    def lists_all(self) -> bool:
        """Whether `HeadState.top` has the lists of all levels."""
        return self.kind.depth_is_free and self.after is None

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
        if self.after is not None:
            return MarkovLevels(state, top_m, self.after)
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


class MarkovLevels:
    """DSpark: the list of a node is made of the state of its level's row and the node's own token; a `LevelSource`.

    Of a level V logits per node are there at a time, as of a level of an EAGLE head.
    """

    def __init__(self, state: HeadState, top_m: int, after: LogitsAfter) -> None:
        """state: of `block_state`; top_m is how many tokens to list per node."""
        self._top, self._states, self._top_m, self._after = state.top, state.hidden, top_m, after

    def root(self) -> TopM:
        """The tokens that were listed after the root."""
        return self._top

    def children(self, level: int, frontier: Frontier) -> TopM:
        """The tokens after each node of the frontier, whose level's row is the same."""
        logits = self._after(self._states[:, level - 1], frontier.tokens)
        return TopM.of(logits.flatten(0, 1), self._top_m)


def block_of(levels: HeadLevels) -> Block:
    """The block of a block drafter."""
    assert levels.block is not None
    return levels.block


def block_state(
    levels: HeadLevels, states: Tensor, roots: Tensor, steps: int, top_m: int, logits_of: Callable[[Tensor], Tensor]
) -> HeadState:
    """What a block leaves for the draft of its first levels: states [b, R, H] of its rows, after roots [b].

    The lists [b, steps, M] of the levels; with a Markov head the list [b, M] of the first level and the states
    [b, steps, H] of all, of which `MarkovLevels` makes the others. logits_of: of states [b * steps, H].
    """
    first, b = block_of(levels).first, len(states)
    of_levels = states[:, first : first + steps]
    if levels.after is not None:
        logits = levels.after(of_levels[:, 0], roots.long()[:, None])
        return HeadState(TopM.of(logits.flatten(0, 1), top_m), of_levels)
    top = TopM.of(logits_of(of_levels.flatten(0, 1)), top_m)
    return HeadState(TopM(*(values.view(b, steps, -1) for values in top)), states[:, 0])


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
