"""How far the results of two runs of one round may differ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.round import Drafts
from eagle_plugin.engines.sglang.decode_round import Extended
from eagle_plugin.engines.sglang.verifier import TargetOutput
from eagle_plugin.selftest.tree_paths import relative_difference

# Relative differences of a row of floats: a graph and the same function as it is run the same kernels.
SAME_SIZES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
# The least part of the same tokens, where floats are not the same to the last bit: then near ties fall either way.
LEAST_COMMON = 0.75


class Results(NamedTuple):
    """What one round's functions gave, each on what the captured function before it gave."""

    drafts: Drafts
    output: TargetOutput
    accepted: Accepted
    extended: Extended
    moved: list[Tensor]  # [b, E, heads, dim]: keys and values of the accepted tokens, in some layers


class RoundComparison:
    """Compares what b requests' round gave with what it should have given."""

    def __init__(self, what: str, b: int, shape: Shape, dtype: torch.dtype) -> None:
        """what: of the sentences; dtype: of the models."""
        self._what, self._b, self._shape, self._dtype = what, b, shape, dtype
        self._found: list[str] = []

    def differences(self, found: Results, wanted: Results) -> list[str]:
        """One sentence per function whose results differ."""
        b, width, longest = self._b, self._shape.width, self._shape.max_accept_length
        # verify
        exact = self._rows("verify", "logits", found.output.logits[: b * width], wanted.output.logits[: b * width])
        self._rows("verify", "features", found.output.features[: b * width], wanted.output.features[: b * width])
        # walk: no model, so that nothing may differ
        for name, x, y in zip(found.accepted._fields, found.accepted, wanted.accepted, strict=True):
            self._equal("walk", name, x[:b], y[:b])
        # extend
        features = found.extended.features[: b * longest], wanted.extended.features[: b * longest]
        for i, (x, y) in enumerate(zip(found.moved, wanted.moved, strict=True)):
            self._rows("extend", f"moved keys and values {i}", x.flatten(0, 1).flatten(1), y.flatten(0, 1).flatten(1))
        self._rows("extend", "features", *features)
        (head, roots), (head_, roots_) = found.extended.state, wanted.extended.state
        self._equal("extend", "roots", roots[:b], roots_[:b])
        exact &= self._rows("extend", "hidden states", head.hidden[:b], head_.hidden[:b])
        exact &= self._rows("extend", "log p", _finite(head.top.logp[:b]), _finite(head_.top.logp[:b]))
        possible = head.top.logp[:b] > -torch.inf
        self._tokens("extend", "tokens", head.top.tokens[:b] * possible, head_.top.tokens[:b] * possible, exact)
        # draft
        tree, tree_ = found.drafts.tree, wanted.drafts.tree
        self._equal("draft", "tree.tokens of the roots", tree.tokens[:b, 0], tree_.tokens[:b, 0])
        if exact:
            for name, x, y in zip(tree._fields, tree, tree_, strict=True):
                self._equal("draft", f"tree.{name}", x[:b], y[:b])
        else:
            named, named_ = (x.tokens[:b] * (width + 1) + x.depths[:b] for x in (tree, tree_))
            self._tokens("draft", "tokens of the trees", named, named_, exact)
        return self._found

    def _rows(self, function: str, name: str, found: Tensor, wanted: Tensor) -> bool:
        """Compare rows of floats; whether they are the same to the last bit."""
        if torch.equal(found.nan_to_num(), wanted.nan_to_num()):
            return True
        off = relative_difference(found.float(), wanted.float())
        allowed = SAME_SIZES[self._dtype]
        if count := int((~(off <= allowed)).sum()):
            worst = float(off.nan_to_num(nan=torch.inf).max())
            self._say(function, name, f"{count} of {len(off)} rows differ, by {worst:.2g} of their size", allowed)
        return False

    def _equal(self, function: str, name: str, found: Tensor, wanted: Tensor) -> None:
        wrong = (found != wanted).flatten()
        if count := int(wrong.sum()):
            at = int(wrong.int().argmax())
            x, y = found.flatten()[at].item(), wanted.flatten()[at].item()
            self._say(function, name, f"{count} of {wrong.numel()} values differ, such as {x} in place of {y}")

    def _tokens(self, function: str, name: str, found: Tensor, wanted: Tensor, exact: bool) -> None:
        """Token lists [b, n]: equal where the floats were, else mostly the same tokens in any order."""
        if exact:
            self._equal(function, name, found, wanted)
            return
        common = (found[:, :, None] == wanted[:, None]).any(dim=2).float().mean()
        if float(common) < LEAST_COMMON:
            self._say(function, name, f"{float(common):.0%} of the tokens are the same", LEAST_COMMON)

    def _say(self, function: str, name: str, what: str, allowed: float | None = None) -> None:
        limit = "" if allowed is None else f", the limit is {allowed:.2g}"
        self._found.append(f"{self._what}: {function}: {name}: {what}{limit}")


def _finite(logp: Tensor) -> Tensor:
    """Log probabilities of which the impossible are as low as a float's rounding can tell."""
    return logp.clamp(min=-50.0)
