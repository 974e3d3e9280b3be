"""How far what was captured may differ from the same functions as they are, and one sentence for what does."""

from __future__ import annotations

import torch
from torch import Tensor

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
