"""Holds what the captured functions of a decode round leave for each other, in memory of fixed address."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.graphs import StaticMemory
from eagle_plugin.runtime.round import Drafts, HeadState, TopM


class OneRequest(NamedTuple):
    """What a round of one request leaves: the widths and dtypes of a round's values."""

    logits: Tensor  # [n, V] of the target, of any rows
    features: Tensor  # [n, F] of the target, as the head reads them
    state: HeadState  # [1, ...], as sampled requests have it
    drafts: Drafts  # of a sampled request


class RoundMemory(StaticMemory):
    """Memory for rounds of up to `most` requests with shapes up to `caps`; a name with a dot is a field.

    The rows of a padded batch come request by request, those of padding last.
    """

    def __init__(
        self, caps: Shape, most: int, like: OneRequest, rows: int | None = None, logits: Tensor | None = None
    ) -> None:
        """rows: nodes of all trees of a round, at most; None: as many as that many requests have with the caps.

        logits: memory of the engine for them, [rows, V] float32, which nothing else writes during a round; None: it is
        allocated.
        """
        super().__init__(like.logits.device)
        self._caps, self._like = caps, like
        rows = most * caps.width if rows is None else rows
        on_paths = min(most * caps.max_accept_length, rows)
        if logits is None:
            self.allocate("logits", rows * like.logits.shape[1], torch.float32)
        else:
            self.adopt("logits", logits)
        self.allocate_rows("features", rows, like.features)
        self.allocate("accepted.index", on_paths, torch.int32)
        self.allocate("accepted.lengths", most, torch.int32, 1)
        self.allocate("accepted.tokens", on_paths, torch.int64)
        self.allocate("roots", most, torch.int64)
        self.allocate_rows("state.hidden", most, like.state.hidden)
        for name, values in like.state.top._asdict().items():
            self.allocate_rows(f"state.{name}", most, values)
        for name, values in like.drafts.tree._asdict().items():
            self.allocate(f"tree.{name}", rows, values.dtype)

    def logits(self, padded_b: int, width: int | None = None) -> Tensor:
        """[B * W, V] float32; width: of the trees, if not that of the caps."""
        return self.view("logits", padded_b * (width or self._caps.width), self._like.logits.shape[1])

    def features(self, padded_b: int, width: int | None = None) -> Tensor:
        """[B * W, F]; width as of `logits`."""
        return self.view("features", padded_b * (width or self._caps.width), *self._like.features.shape[1:])

    def tree(self, padded_b: int, width: int | None = None) -> DraftTree:
        """The drafted trees; width as of `logits`."""
        nodes = width or self._caps.width
        return self.view_fields("tree", DraftTree, padded_b, nodes)

    def accepted(self, padded_b: int, longest: int) -> Accepted:
        """The accepted paths of trees with at most so many nodes on a path, the root included."""
        index, tokens = (self.view(f"accepted.{name}", padded_b, longest) for name in ("index", "tokens"))
        return Accepted(index, self.view("accepted.lengths", padded_b), tokens)

    def state(self, padded_b: int, top_m: int | None = None) -> HeadState:
        """What the head left; top_m: the tokens of its lists, if not as many as sampled requests have."""
        like = self._like.state
        *levels, most = like.top.logp.shape[1:]
        top = self.view_fields("state", TopM, padded_b, *levels, top_m or most)
        return HeadState(top, self.view("state.hidden", padded_b, *like.hidden.shape[1:]))

    def put_state(self, state: HeadState) -> None:
        """Put what the head left for b requests."""
        self.put_fields("state", state.top)
        self.put("state.hidden", state.hidden)

    def put_padded(self, name: str, values: Tensor, padded_b: int, otherwise: int) -> None:
        """Put the values of b requests, [b, ...]; the padding after them gets `otherwise`."""
        self.put(name, values)
        if padded_b > len(values):
            self.view(name, padded_b, *values.shape[1:])[len(values) :] = otherwise

    def put_accepted(self, accepted: Accepted, padded_b: int) -> None:
        """Put paths that were not walked in this memory; what another round left for the padding is no path of this."""
        for name, values in accepted._asdict().items():
            self.put_padded(f"accepted.{name}", values, padded_b, 1 if name == "lengths" else 0)
