"""How far the results of two runs of one round may differ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.selftest.comparison import Comparison, finite
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.verifier import TargetOutput


class Results(NamedTuple):
    """What one round's functions gave, each on what the captured function before it gave."""

    drafts: Drafts
    output: TargetOutput
    accepted: Accepted
    state: DraftState  # after the round
    moved: list[Tensor]  # [b, E, heads, dim]: keys and values of the accepted tokens, in some layers


class RoundComparison(Comparison):
    """Compares what b requests' round gave with what it should have given."""

    def __init__(self, what: str, b: int, shape: Shape, dtype: torch.dtype) -> None:
        """what: of the sentences; dtype: of the models."""
        super().__init__(what, dtype)
        self._b, self._shape = b, shape

    def differences(self, found: Results, wanted: Results) -> list[str]:
        """One sentence per function whose results differ."""
        b, width = self._b, self._shape.width
        # verify
        exact = self.rows("verify", "logits", found.output.logits[: b * width], wanted.output.logits[: b * width])
        self.rows("verify", "features", found.output.features[: b * width], wanted.output.features[: b * width])
        # walk: no model, so that nothing may differ
        for name, x, y in zip(found.accepted._fields, found.accepted, wanted.accepted, strict=True):
            self.equal("walk", name, x[:b], y[:b])
        # extend
        for i, (x, y) in enumerate(zip(found.moved, wanted.moved, strict=True)):
            self.rows("extend", f"moved keys and values {i}", x.flatten(0, 1).flatten(1), y.flatten(0, 1).flatten(1))
        (head, roots), (head_, roots_) = found.state, wanted.state
        self.equal("extend", "roots", roots[:b], roots_[:b])
        exact &= self.rows("extend", "hidden states", head.hidden[:b], head_.hidden[:b])
        exact &= self.rows("extend", "log p", finite(head.top.logp[:b]), finite(head_.top.logp[:b]))
        possible = head.top.logp[:b] > -torch.inf
        self.tokens("extend", "tokens", head.top.tokens[:b] * possible, head_.top.tokens[:b] * possible, exact)
        # draft
        tree, tree_ = found.drafts.tree, wanted.drafts.tree
        self.equal("draft", "tree.tokens of the roots", tree.tokens[:b, 0], tree_.tokens[:b, 0])
        if exact:
            for name, x, y in zip(tree._fields, tree, tree_, strict=True):
                self.equal("draft", f"tree.{name}", x[:b], y[:b])
        else:
            named, named_ = (x.tokens[:b] * (width + 1) + x.depths[:b] for x in (tree, tree_))
            self.tokens("draft", "tokens of the trees", named, named_, exact)
        return self.found
