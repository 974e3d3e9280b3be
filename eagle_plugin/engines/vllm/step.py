"""One step of vLLM's batch: which requests verify a tree, and where its nodes and the other rows stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.engines.numbers import no_proposals
from eagle_plugin.engines.vllm.attention import ExtendRows, Rows, TreeRows
from eagle_plugin.kernels.sampling import Proposals


class Drafts(NamedTuple):
    """What one drafting left: trees and proposals of its batch."""

    tree: DraftTree
    proposals: Proposals


class DraftStore:
    """The drafted tree of each request, from the step that drafts it to the step that verifies it."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Drafts, int]] = {}

    def put(self, request_ids: Sequence[str], drafts: Drafts) -> None:
        """Keep the trees of a batch, in its order, instead of older ones."""
        self._found |= {name: (drafts, i) for i, name in enumerate(request_ids)}

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the trees of these requests."""
        for name in request_ids:
            self._found.pop(name, None)

    def take(self, request_ids: Sequence[str]) -> Drafts | None:
        """The trees of these requests in this order; one that has none gets a root. None if no request has a tree."""
        found = [self._found.pop(name, None) for name in request_ids]
        kept = [entry for entry in found if entry is not None]
        if not kept:
            return None
        first = kept[0][0]
        if len(kept) == len(found) and all(drafts is first for drafts, _ in kept):
            rows = [row for _, row in kept]
            if rows == list(range(len(first.tree.tokens))):
                return first
            index = torch.tensor(rows, device=first.tree.tokens.device)
            return Drafts(DraftTree(*(x[index] for x in first.tree)), Proposals(*(x[index] for x in first.proposals)))
        tokens = first.tree.tokens
        root = Drafts(padding_trees(1, tokens.shape[1], tokens.device), no_proposals(1, tokens.device))
        return _joined([(root, 0) if entry is None else entry for entry in found])


def _joined(entries: list[tuple[Drafts, int]]) -> Drafts:
    """Trees of several draftings; proposals have as many rows and tokens as the largest."""
    trees = [DraftTree(*(x[row : row + 1] for x in drafts.tree)) for drafts, row in entries]
    proposals = [Proposals(*(x[row : row + 1] for x in drafts.proposals)) for drafts, row in entries]
    rows = max(p.tokens.shape[1] for p in proposals)
    listed = max(p.tokens.shape[2] for p in proposals)
    padded = [
        Proposals(*(torch.nn.functional.pad(x, (0, listed - x.shape[2], 0, rows - x.shape[1])) for x in p))
        for p in proposals
    ]
    return Drafts(
        DraftTree(*(torch.cat(parts) for parts in zip(*trees, strict=True))),
        Proposals(*(torch.cat(parts) for parts in zip(*padded, strict=True))),
    )


class Step(NamedTuple):
    """The rows of one forward of the target; b requests, t of them verify a tree of W nodes.

    Logits rows stand request by request, a tree's in node order.
    """

    b: int
    trees: Tensor  # [t] int64: requests with a tree
    others: Tensor  # [b - t] int64: requests without
    tree: DraftTree  # [t, W]
    proposals: Proposals  # of t requests
    query: Tensor  # [t, W] int64: query row of each node; padding has that of the last node
    logits_rows: Tensor | None  # [b, W] int64: logits row of each node; None: in order
    starts: Tensor  # [b] int64: first query row of each request
    lens: Tensor  # [b] int64: query rows
    prefix_lens: Tensor  # [b] int64: tokens before this step
    uniform: bool  # every query row is a node, in order

    @property
    def width(self) -> int:
        """W; 1 without trees."""
        return self.tree.tokens.shape[1]

    @property
    def roots(self) -> Tensor:
        """Position of each request's last committed token, its tree's root, [b] int64."""
        roots = self.prefix_lens + self.lens - 1
        if len(self.trees):
            roots = roots.index_copy(0, self.trees, self.prefix_lens[self.trees])
        return roots

    def rows(self) -> Rows:
        """How the query rows attend."""
        extend = tree = None
        if len(self.others):
            some = self.others
            prefix, lens = self.prefix_lens[some], self.lens[some]
            extend = ExtendRows(some, prefix + lens, lens, self.starts[some])
        if len(self.trees):
            query, words = None, self.tree.ancestors
            if not self.uniform:
                query = self.query.reshape(-1)
                # Padding writes to the row of its tree's last node: it must attend to the same keys.
                words = words.gather(1, self.query - self.query[:, :1])
            tree = TreeRows(self.trees, self.prefix_lens[self.trees], words, self.width, query)
        return Rows(extend, tree)


def plan_step(
    drafts: np.ndarray, lens: np.ndarray, request_ids: Sequence[str], prefix_lens: Tensor, store: DraftStore
) -> Step:
    """Plan a step; drafts and lens [b] are each request's scheduled draft tokens and query rows (on the host).

    A scheduler may cut a tree short: nodes stand behind their parents, so that what is left is a tree. A request whose
    scheduled drafts are no tree of ours verifies its root only: past the drafter's reach vLLM schedules zeros, and it
    fills up the step of a new request that has one token to compute.
    """
    device = prefix_lens.device
    b = len(drafts)
    trees = np.nonzero(drafts)[0]
    others = np.nonzero(drafts == 0)[0]
    width = int(drafts.max(initial=0)) + 1
    taken = _take(store, [request_ids[i] for i in trees], width, device)
    tree = taken.tree
    ends = np.cumsum(lens)
    starts = ends - lens
    sizes = drafts[trees] + 1
    nodes = np.arange(width)
    if (sizes < width).any():
        tree = _cut(tree, torch.from_numpy(nodes >= sizes[:, None]).to(device))
    query = starts[trees, None] + np.minimum(nodes, sizes[:, None] - 1)
    logits_rows = None
    if len(trees) < b or (sizes < width).any():
        rows = np.cumsum(drafts + 1) - drafts - 1
        logits_rows = torch.from_numpy(rows[:, None] + np.minimum(nodes, drafts[:, None]).astype(np.int64)).to(device)
        if width == 1:
            logits_rows = None
    return Step(
        b=b,
        trees=torch.from_numpy(trees).to(device),
        others=torch.from_numpy(others).to(device),
        tree=tree,
        proposals=taken.proposals,
        query=torch.from_numpy(query.astype(np.int64)).to(device),
        logits_rows=logits_rows,
        starts=torch.from_numpy(starts.astype(np.int64)).to(device),
        lens=torch.from_numpy(lens.astype(np.int64)).to(device),
        prefix_lens=prefix_lens.long(),
        uniform=len(trees) == b and bool((sizes == width).all()),
    )


def _take(store: DraftStore, request_ids: list[str], width: int, device: torch.device) -> Drafts:
    drafts = store.take(request_ids) if request_ids else None
    if drafts is None or drafts.tree.tokens.shape[1] < width:
        return Drafts(padding_trees(len(request_ids), width, device), no_proposals(len(request_ids), device))
    return Drafts(DraftTree(*(x[:, :width].contiguous() for x in drafts.tree)), drafts.proposals)


def padding_trees(b: int, width: int, device: torch.device) -> DraftTree:
    """Trees [b, W] whose nodes behind the root are all padding, with no token of their own."""
    nodes = torch.ones(width, dtype=torch.int64, device=device) << torch.arange(width, device=device)
    zeros = torch.zeros(b, width, dtype=torch.int64, device=device)
    none = torch.full((b, width), -1, dtype=torch.int32, device=device)
    return DraftTree(zeros, none, torch.zeros_like(none), (nodes | 1).repeat(b, 1), none.clone())


def _cut(tree: DraftTree, gone: Tensor) -> DraftTree:
    """The trees without some of their last nodes; gone [t, W] bool."""
    padding = padding_trees(len(gone), gone.shape[1], gone.device)
    links = (torch.where(gone, nothing, kept) for nothing, kept in zip(padding[1:], tree[1:], strict=True))
    return DraftTree(tree.tokens, *links)
