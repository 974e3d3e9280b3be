"""Reads vLLM's batch: which requests verify a tree, and which rows of the forward are its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.round import Drafts, TreeRows
from eagle_plugin.vllm.attention import ExtendRows, Rows


@lru_cache(maxsize=256)
def root_drafts(b: int, device: torch.device) -> Drafts:
    """Roots of b requests without drafts, token 0 each; always the same tensors, which nobody may write to."""
    return Drafts.plain(torch.zeros(b, dtype=torch.int64, device=device))


class DraftStore:
    """The draft tree of each request, from the step that drafts it to the step that verifies it."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Drafts, int]] = {}
        self._newest: tuple[frozenset[str], int] = frozenset(), 0
        self._borrowed: Drafts | None = None  # in memory that a later step overwrites

    def put(self, request_ids: Sequence[str], drafts: Drafts, borrowed: bool = False) -> None:
        """Keep the drafts of a batch, in its order, instead of older ones; plain ones need not be kept.

        borrowed: they lie in memory that is overwritten later, not before `keep_own` is called.
        """
        self._borrowed = drafts if borrowed else None
        width = drafts.tree.tokens.shape[1]
        self._newest = frozenset(request_ids), width
        if width > 1:
            self._found |= {name: (drafts, i) for i, name in enumerate(request_ids)}
        else:
            self.forget(request_ids)

    def keep_own(self) -> None:
        """Copy what requests still have in borrowed memory: those that missed the step after their drafting."""
        borrowed, self._borrowed = self._borrowed, None
        left = {} if borrowed is None else {name: i for name, (kept, i) in self._found.items() if kept is borrowed}
        if borrowed is not None and left:
            own = borrowed.clone()
            self._found |= {name: (own, i) for name, i in left.items()}

    def take_newest(self) -> tuple[frozenset[str], int]:
        """The requests that the last step drafted for, and the width of their trees; none if it did not draft."""
        newest, self._newest = self._newest, (frozenset(), 0)
        return newest

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the drafts of these requests."""
        for name in request_ids:
            self._found.pop(name, None)

    def forget_unmasked(self, constrained: Sequence[str], masked: bool) -> None:
        """Drop the trees for which a scheduler that is ahead made no masks; constrained: requests with a grammar.

        masked: it made some, which are for trees that the last step drafted, not for those of a request that missed it.
        """
        self.forget([name for name in constrained if not masked or name not in self._newest[0]])

    def take(self, request_ids: Sequence[str]) -> Drafts | None:
        """The drafts of these requests in this order; one without gets a root. None if no request has any."""
        found = [self._found.pop(name, None) for name in request_ids]
        kept = [entry for entry in found if entry is not None]
        if not kept:
            return None
        first = kept[0][0]
        tokens = first.tree.tokens
        in_order = [i for _, i in kept] == list(range(len(tokens))) and len(kept) == len(found)
        if in_order and all(drafts is first for drafts, _ in kept):
            return first
        root = Drafts.plain(tokens.new_zeros(1), tokens.shape[1])
        taken = [(root, 0) if entry is None else entry for entry in found]
        steps = list({id(drafts): drafts for drafts, _ in taken}.values())
        sizes = [len(drafts.tree.tokens) for drafts in steps]
        begins = {id(drafts): end - size for drafts, end, size in zip(steps, accumulate(sizes), sizes, strict=True)}
        (index,) = to_device([np.array([begins[id(drafts)] + i for drafts, i in taken])], tokens.device)
        return (steps[0] if len(steps) == 1 else Drafts.concatenate(steps)).take(index)


class RoundBatch(NamedTuple):
    """The rows of one forward of the target; b requests, t of them verify a tree of W nodes.

    Rows of logits are in the order of the requests, those of a tree in the order of its nodes.
    """

    b: int
    trees: Tensor  # [t] int64: requests with a tree
    others: Tensor  # [b - t] int64: requests without
    drafts: Drafts  # of t requests
    query: Tensor  # [t, W] int64: query row of each node; padding has that of the last node
    logits_rows: Tensor | None  # [b, W] int64: logits row of each node; None: in order
    starts: Tensor  # [b] int64: first query row of each request
    lens: Tensor  # [b] int64: query rows
    host_lens: list[int]  # the same, on the host
    other_lens: list[int]  # query rows of each request without a tree, on the host
    prefix_lens: Tensor  # [b] int64: tokens before this step
    uniform: bool  # every query row is a node, in order
    newest: list[int]  # requests that just verify all that the last step drafted for them; plain rounds count as well

    @property
    def width(self) -> int:
        """W; 1 without trees."""
        return self.drafts.tree.tokens.shape[1]

    @property
    def roots(self) -> Tensor:
        """Position of each request's last committed token, the root of its tree: L, [b] int64."""
        if len(self.trees) == self.b:
            return self.prefix_lens
        roots = self.prefix_lens + self.lens - 1
        if len(self.trees):
            roots = roots.index_copy(0, self.trees, self.prefix_lens[self.trees])
        return roots

    def of_trees(self, values: Tensor) -> Tensor:
        """Of values [b, ...] of all requests those of the trees, [t, ...]."""
        return values if len(self.trees) == self.b else values[self.trees]

    @property
    def nodes(self) -> Tensor:
        """The node that each node of the trees stands for, [t, W] int64: padding stands for its tree's last one."""
        return self.query - self.query[:, :1]

    @classmethod
    def read(
        cls, counts: np.ndarray, lens: np.ndarray, request_ids: Sequence[str], prefix_lens: Tensor, store: DraftStore
    ) -> RoundBatch:
        """Read a step; counts and lens [b] are each request's scheduled draft tokens and query rows (on the host).

        A scheduler may cut a tree short: nodes come after their parents, so what is left is a tree. A request whose
        scheduled drafts are no tree of ours verifies its root only: past the drafter's reach vLLM schedules zeros, and
        it fills up the step of a new request that has one token to compute. What is scheduled beyond a tree is padding.
        """
        device = prefix_lens.device
        b = len(counts)
        trees, others = np.nonzero(counts)[0], np.nonzero(counts == 0)[0]
        drafted, drafted_width = store.take_newest()
        whole = np.nonzero((lens == drafted_width) & (counts + 1 == drafted_width))[0].tolist()
        width = int(counts.max(initial=0)) + 1
        sizes = counts[trees] + 1
        cut = bool((sizes < width).any())
        drafts = _take(store, [request_ids[i] for i in trees], width, device)
        nodes = np.arange(width)
        starts = np.cumsum(lens) - lens
        query = starts[trees, None] + np.minimum(nodes, sizes[:, None] - 1)
        first = np.cumsum(counts + 1) - counts - 1
        logits_rows = first[:, None] + np.minimum(nodes, counts[:, None])
        in_order = width == 1 or (len(trees) == b and not cut)
        planned = to_device([trees, others, query, starts, lens, sizes, logits_rows], device)
        if cut:
            drafts = drafts.truncate(planned[5])
        return cls(
            b=b,
            trees=planned[0],
            others=planned[1],
            drafts=drafts,
            query=planned[2],
            logits_rows=None if in_order else planned[6],
            starts=planned[3],
            lens=planned[4],
            host_lens=lens.tolist(),
            other_lens=lens[others].tolist(),
            prefix_lens=prefix_lens.long(),
            uniform=len(trees) == b and not cut,
            newest=[i for i in whole if request_ids[i] in drafted],
        )

    def put_trees(self, ids: Tensor, positions: Tensor) -> None:
        """Write the positions of the trees' nodes, and their tokens but the roots', into query rows of [n] values."""
        tree = self.drafts.tree
        if self.uniform:
            n = self.b * self.width
            torch.add(self.prefix_lens[:, None], tree.depths, out=positions[:n].view(self.b, self.width))
            ids[:n].view(self.b, self.width)[:, 1:] = tree.tokens[:, 1:]
        elif len(self.trees):
            rows, node = self.query, self.nodes  # padding gets the token and position of the node that it stands for
            positions[rows] = (self.of_trees(self.prefix_lens)[:, None] + tree.depths).gather(1, node)
            ids[rows] = torch.where(node > 0, tree.tokens.gather(1, node).int(), ids[rows])

    def rows(self) -> Rows:
        """How the query rows attend."""
        extend = tree = query = None
        if len(self.others):
            prefix, lens = self.prefix_lens[self.others], self.lens[self.others]
            extend = ExtendRows(self.others, prefix + lens, lens, self.starts[self.others])
        if len(self.trees):
            ancestors = self.drafts.tree.ancestors
            if not self.uniform:
                query = self.query.reshape(-1)
                # Padding writes to the row of its tree's last node: it must attend to the same keys.
                ancestors = ancestors.gather(1, self.nodes)
            tree = TreeRows(self.trees, self.of_trees(self.prefix_lens), ancestors, self.width)
        return Rows(extend, tree, query, self.other_lens)

    def all_drafts(self) -> Drafts:
        """The drafts of all b requests; those without a tree have a root only."""
        if len(self.trees) == self.b:
            return self.drafts
        if not len(self.trees):
            return root_drafts(self.b, self.trees.device)
        roots = Drafts.plain(self.others.new_zeros(len(self.others)), self.width)
        order = torch.cat([self.trees, self.others]).argsort()
        return Drafts.concatenate([self.drafts, roots]).take(order)

    def tree_logits(self, logits: Tensor) -> Tensor:
        """The logits [b * W, V] after each node, row i * W + j after node j of request i; padding repeats a row."""
        return logits if self.logits_rows is None else logits[self.logits_rows.view(-1)]

    def logits_row_of(self, rows: Tensor) -> Tensor:
        """The row of vLLM's logits of each of these rows of `tree_logits`; any shape, int64."""
        return rows if self.logits_rows is None else self.logits_rows.view(-1)[rows]


def _take(store: DraftStore, request_ids: list[str], width: int, device: torch.device) -> Drafts:
    if not request_ids:
        return root_drafts(0, device)
    drafts = store.take(request_ids)
    if drafts is None:
        return Drafts.plain(torch.zeros(len(request_ids), dtype=torch.int64, device=device), width)
    return drafts.resize(width)
