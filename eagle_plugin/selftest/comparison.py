"""Compares the results of captured functions with those of the same functions as they are, one sentence per result that
differs by more than is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.round import HeadState
from eagle_plugin.selftest.tree_paths import relative_difference

# Relative differences of a row of floats: a graph and the same function as it is run the same kernels.
SAME_SIZES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
# The least part of the same tokens, where floats are not the same to the last bit: then near ties fall either way.
LEAST_COMMON = 0.75
AT_ONCE = 2**23  # values that are compared at once: the logits of all rows would need copies as large as they are


class Comparison:
    """Compares what a round's functions gave with what they should have given."""

    def __init__(self, what: str, dtype: torch.dtype) -> None:
        """what: of the sentences; dtype: of the models."""
        self._what, self._dtype = what, dtype
        self.found: list[str] = []  # one sentence per result that differs

    def rows(self, function: str, name: str, found: Tensor, wanted: Tensor) -> bool:
        """Compare rows of floats; whether they are the same to the last bit."""
        parts = in_parts(found), in_parts(wanted)
        if all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(*parts, strict=True)):
            return True
        off = torch.cat([relative_difference(x.float(), y.float()) for x, y in zip(*parts, strict=True)])
        allowed = SAME_SIZES[self._dtype]
        if count := int((~(off <= allowed)).sum()):
            worst = float(off.nan_to_num(nan=torch.inf).max())
            self.say(function, name, f"{count} of {len(off)} rows differ, by {worst:.2g} of their size", allowed)
        return False

    def equal(self, function: str, name: str, found: Tensor, wanted: Tensor) -> None:
        """Compare whole numbers."""
        wrong = (found != wanted).flatten()
        if count := int(wrong.sum()):
            at = int(wrong.int().argmax())
            x, y = found.flatten()[at].item(), wanted.flatten()[at].item()
            self.say(function, name, f"{count} of {wrong.numel()} values differ, such as {x} in place of {y}")

    def tokens(self, function: str, name: str, found: Tensor, wanted: Tensor, exact: bool) -> None:
        """Token lists [b, n]: equal where the floats were, else mostly the same tokens in any order."""
        if exact:
            self.equal(function, name, found, wanted)
            return
        common = (found[:, :, None] == wanted[:, None]).any(dim=2).float().mean()
        if float(common) < LEAST_COMMON:
            self.say(function, name, f"{float(common):.0%} of the tokens are the same", LEAST_COMMON)

    # What a round's functions give

    def trees(self, found: DraftTree, wanted: DraftTree, exact: bool) -> None:
        """Drafted trees [b, W]; exact: the scores of their nodes are the same to the last bit."""
        if exact:
            for name, x, y in zip(found._fields, found, wanted, strict=True):
                self.equal("draft", f"tree.{name}", x, y)
            return
        width = found.tokens.shape[1]
        named, named_ = (tree.tokens * (width + 1) + tree.depths for tree in (found, wanted))
        self.tokens("draft", "tokens of the trees", named, named_, exact)

    def accepted(self, found: Accepted, wanted: Accepted) -> None:
        """What the walk gave: no model, so that nothing may differ."""
        for name, x, y in zip(found._fields, found, wanted, strict=True):
            self.equal("walk", name, x, y)

    def moved(self, function: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """Keys or values [b, n, heads, dim] where accepted tokens have theirs, in some layers."""
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            self.rows(function, f"moved keys and values {i}", x.flatten(0, 1).flatten(1), y.flatten(0, 1).flatten(1))

    def head(self, found: HeadState, wanted: HeadState, exact: bool = True) -> bool:
        """What the head leaves for the next draft; whether it, and all that it was made from, is the same to the last
        bit."""
        exact &= self.rows("extend", "hidden states", found.hidden, wanted.hidden)
        logp, logp_ = (finite(x.top.logp).flatten(0, -2) for x in (found, wanted))
        exact &= self.rows("extend", "log p", logp, logp_)
        possible = found.top.logp > -torch.inf
        tokens, tokens_ = ((x.top.tokens * possible).flatten(0, -2) for x in (found, wanted))
        self.tokens("extend", "tokens", tokens, tokens_, exact)
        return exact

    def say(self, function: str, name: str, what: str, allowed: float | None = None) -> None:
        """Note a difference; allowed: the limit, of one that has a limit."""
        limit = "" if allowed is None else f", the limit is {allowed:.2g}"
        self.found.append(f"{self._what}: {function}: {name}: {what}{limit}")


def in_parts(rows: Tensor) -> tuple[Tensor, ...]:
    """Views of some rows each, of `AT_ONCE` values or a little fewer."""
    return rows.split(max(1, AT_ONCE // max(rows[:1].numel(), 1)))


def finite(logp: Tensor) -> Tensor:
    """Log probabilities of which the impossible are as low as a float's rounding can tell."""
    return logp.clamp(min=-50.0)
