"""Limits the drafted trees of a batch to what each of its requests asks for, on the device.

A batch is drafted with one shape. A request without drafts gets a tree of its root alone, one that wants nothing of the
head the path that was looked up. The trees keep their size, so that a captured round goes on as with any others; the
limits themselves are not captured: nothing is launched for a batch in which nobody asks for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.lookup import path_trees
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.lookups import Lookups
from eagle_plugin.runtime.request_sources import Sources


class Limits(NamedTuple):
    """Requests by their places in a batch."""

    drafting: list[int]  # that have drafts
    without: Tensor  # [n] int64: that have none
    looked_up: Tensor  # [m] int64: that have looked-up paths alone

    def apply(self, tree: DraftTree, lookups: Lookups | None, rows: Tensor | None) -> None:
        """Change the trees [b, W] of a draft in place.

        rows [b] int64: of `lookups`, in which this draft was looked up; None where there is nothing to look up.
        """
        width = tree.tokens.shape[1]
        _put(tree, self.without, DraftTree.padding(tree.tokens[self.without, 0], width))
        if lookups is not None and rows is not None and len(self.looked_up):
            roots = tree.tokens[self.looked_up, 0]
            _put(tree, self.looked_up, path_trees(lookups.history, rows[self.looked_up], roots, width))


def _put(tree: DraftTree, places: Tensor, others: DraftTree) -> None:
    for values, new in zip(tree, others, strict=True):
        values.index_copy_(0, places, new)


class LimitMaker:
    """Makes the limits of each round; those of a batch that asks as the one before are not made again."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._newest: tuple[list[Sources], Limits] | None = None

    def of(self, sources: Sequence[Sources]) -> Limits | None:
        """By what the trees of the batch's requests come from, as far as the server has it; None without limits.

        A request that wants nothing looked up has no limit here: its branches are not looked up (`Lookups.begin`).
        """
        if all(one.head for one in sources):
            return None
        asked = list(sources)
        if self._newest is None or self._newest[0] != asked:
            places = range(len(asked))
            without = np.array([i for i in places if not any(asked[i])], dtype=np.int64)
            looked_up = np.array([i for i in places if asked[i].lookup and not asked[i].head], dtype=np.int64)
            drafting = [i for i in places if any(asked[i])]
            self._newest = asked, Limits(drafting, *to_device([without, looked_up], self._device))
        return self._newest[1]


def served_sources(asked: Sources, has_lookups: bool) -> Sources:
    """What a request's trees come from on a server that looks branches up, or does not."""
    return asked if has_lookups else Sources(asked.head, lookup=False)
