"""The draft tree: best-first, level by level, then selection of the best nodes (EAGLE-2, section 4).

Letters in shapes: b requests, W nodes of a tree with its root, C candidates, F frontier rows, k children per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """What the target verifies in one forward; node 0 is the last committed token, parents come before children."""

    tokens: Tensor  # [b, W] int64
    parents: Tensor  # [b, W] int32, -1 for the root and for padding nodes
    depths: Tensor  # [b, W] int32
    ancestors: Tensor  # [b, W] int64 holding uint64 bits: bit j of entry i = node j is an ancestor of i, or i itself

    @classmethod
    def padding(cls, root_tokens: Tensor, width: int) -> DraftTree:
        """Trees [b, W] of the root and padding, which carries the root's token; root_tokens [b] int64."""
        b, device = len(root_tokens), root_tokens.device
        none = torch.full((b, width), -1, dtype=torch.int32, device=device)
        nodes = torch.arange(width, device=device)
        own = torch.ones_like(nodes) << nodes | 1  # padding sees the root and itself
        tokens = root_tokens[:, None].repeat(1, width)
        return cls(tokens, none, torch.zeros_like(none), own.repeat(b, 1))

    def padded(self, b: int) -> DraftTree:
        """The same trees, and after them trees of padding alone, of token 0: b together."""
        missing = b - len(self.tokens)
        if not missing:
            return self
        roots = torch.zeros(missing, dtype=torch.int64, device=self.tokens.device)
        return DraftTree.concatenate([self, DraftTree.padding(roots, self.tokens.shape[1])])

    def take(self, index: Tensor) -> DraftTree:
        """The trees of these requests, in this order; index [n] int64."""
        return DraftTree(*(values[index] for values in self))

    def truncate(self, sizes: Tensor) -> DraftTree:
        """The first sizes[i] nodes of tree i, the rest padding; sizes [b] int64, 1 to W.

        Parents come before children, so the rest is a tree.
        """
        b, width = self.tokens.shape
        gone = torch.arange(width, device=sizes.device) >= sizes[:, None]
        padding = DraftTree.padding(self.tokens[:, 0], width)
        return DraftTree(*(torch.where(gone, new, old) for new, old in zip(padding, self, strict=True)))

    def resize(self, width: int) -> DraftTree:
        """Trees of another width: the last nodes are dropped, or padding is added."""
        if width <= self.tokens.shape[1]:
            return DraftTree(*(values[:, :width].contiguous() for values in self))
        padding = DraftTree.padding(self.tokens[:, 0], width)
        for new, old in zip(padding, self, strict=True):
            new[:, : old.shape[1]] = old
        return padding

    @classmethod
    def concatenate(cls, trees: Sequence[DraftTree]) -> DraftTree:
        """The trees of several batches one after the other, as wide as the widest."""
        width = max(tree.tokens.shape[1] for tree in trees)
        return cls(*(torch.cat(values) for values in zip(*(tree.resize(width) for tree in trees), strict=True)))


class Frontier(NamedTuple):
    """The nodes that the draft head reads next, best first."""

    candidates: Tensor  # [b, F] int32, index in the candidate table
    scores: Tensor  # [b, F] float32, sum of log p from the root
    tokens: Tensor  # [b, F] int64, ids of the draft vocabulary as they were given
    parent_rows: Tensor  # [b, F] int64, row of the previous frontier (0 at depth 1)
    ancestors: (
        Tensor  # [b, F] int64 holding uint64 bits over the draft tail's slots (depth-1)*topk + row, own bit included
    )


class CandidateTable(NamedTuple):
    """Every token that the draft head has proposed for this round, in the order of proposal."""

    scores: Tensor  # [b, C] float32
    tokens: Tensor  # [b, C] int64
    parents: Tensor  # [b, C] int32, index of the parent candidate, -1 for the root


def chain_ancestors(length: int, device: torch.device | str) -> Tensor:
    """Ancestor bitmasks [length] int64 holding uint64 bits of a chain: row i has the bits 0 .. i; length <= 64."""
    bits = torch.arange(length, device=device)
    # In two steps: the last row may have all 64 bits, and 1 << 64 is not defined.
    return ((torch.ones_like(bits) << bits) - 1) * 2 + 1


def topk_log_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log p and the index of the k most likely tokens of each row.

    logits [R, V] float32, bfloat16 or float16 -> (logp [R, k] float32, at most 0; index [R, k] int64), descending,
    equal logits by ascending index. NaN counts as impossible (log p = -inf): a broken head lowers acceptance and does
    not stop the server.
    """
    x = logits.float()
    x = torch.where(x.isnan(), -torch.inf, x)
    values, index = x.sort(dim=-1, descending=True, stable=True)
    logp = values[:, :k] - x.logsumexp(dim=-1, keepdim=True)
    return torch.where(logp.isnan(), -torch.inf, logp).clamp(max=0), index[:, :k].contiguous()


def new_table(b: int, C: int, device: torch.device | str = "cpu") -> CandidateTable:
    """Return a table of C impossible candidates for each of b requests."""
    return CandidateTable(
        torch.full((b, C), -torch.inf, device=device),
        torch.zeros(b, C, dtype=torch.int64, device=device),
        torch.full((b, C), -1, dtype=torch.int32, device=device),
    )


def unwritten_table(b: int, C: int, device: torch.device | str = "cpu") -> CandidateTable:
    """Return a table of C candidates for each of b requests, all of which are to be written before a selection."""
    return CandidateTable(
        torch.empty(b, C, device=device),
        torch.empty(b, C, dtype=torch.int64, device=device),
        torch.empty(b, C, dtype=torch.int32, device=device),
    )


def _best(scores: Tensor, n: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :n]  # stable: equal scores by ascending index


def grow_level(
    table: CandidateTable,
    offset: int,
    depth: int,
    logp: Tensor,
    tokens: Tensor,
    previous: Frontier | None,
    topk: int,
) -> Frontier:
    """Write the children of the previous frontier into the table and return the best of them (EAGLE-2, section 4.1).

    logp [b, Fp, k] float32 and tokens [b, Fp, k] int64 are the children of each row of `previous` (Fp = 1, previous =
    None at depth 1, the children of the root). They fill table[:, offset : offset + Fp*k]. The frontier holds F =
    min(topk, Fp*k) rows; topk = 0 at the last depth only records the candidates. Needs (depth-1)*topk + F <= 64.
    """
    b, rows, k = logp.shape
    F = min(topk, rows * k)
    scores, parents = logp, torch.full((b, rows), -1, dtype=torch.int32, device=logp.device)
    if previous is not None:
        scores, parents = previous.scores[:, :, None] + logp, previous.candidates
    scores, new_tokens = scores.reshape(b, rows * k), tokens.reshape(b, rows * k)
    span = slice(offset, offset + rows * k)
    table.scores[:, span] = scores
    table.tokens[:, span] = new_tokens
    table.parents[:, span] = parents.repeat_interleave(k, dim=1)

    best = _best(scores, F)
    parent_rows = best // k
    slots = (depth - 1) * topk + torch.arange(F, device=logp.device)
    ancestors = (torch.ones_like(slots) << slots).expand(b, F)
    if previous is not None:
        ancestors = ancestors | previous.ancestors.gather(1, parent_rows)
    return Frontier(
        (best + offset).int(),
        scores.gather(1, best),
        new_tokens.gather(1, best),
        parent_rows,
        ancestors.contiguous(),
    )


def grow_levels(table: CandidateTable, depth: int, topk: int, logp: Tensor, tokens: Tensor) -> None:
    """Write all levels of trees whose children do not depend on the path above them (P-EAGLE), as `grow_level` would.

    logp [b, R, k] float32, tokens [b, R, k] int64 and draws as in `grow_level`; R = 1 + (depth - 1) * topk rows: the
    root's children, then those of the `topk` best nodes of each level but the last. Needs k >= topk, so that there are
    so many, and (depth - 1) * topk <= 64. The children of a level's nodes differ in what was drawn, or not at all.
    """
    previous: Frontier | None = None
    first, rows, k = 0, 1, logp.shape[2]
    for level in range(1, depth + 1):
        here = slice(first, first + rows)
        keep = topk if level < depth else 0
        previous = grow_level(table, first * k, level, logp[:, here], tokens[:, here], previous, keep)
        first, rows = first + rows, topk


def select_tree(table: CandidateTable, root_tokens: Tensor, width: int) -> DraftTree:
    """Keep the best W - 1 candidates and the root as one tree (EAGLE-2, section 4.2, the reranking).

    root_tokens [b] int64. A child never scores above its parent and comes after it in the table, so the best
    candidates by (score descending, index ascending) include all their parents. Nodes are in table order. When the
    table has fewer than W - 1 candidates the rest is padding: the root's token, parent -1, depth 0, ancestors =
    root and itself.
    """
    b, C = table.scores.shape
    n = min(width - 1, C)
    device = root_tokens.device
    picked = _best(table.scores, n).sort(dim=1).values  # [b, n] candidate of node i + 1
    parent_candidates = table.parents.gather(1, picked).long()
    # the node of a candidate is its place in `picked` plus one; the root's -1 also finds place 0, so it is masked
    places = torch.searchsorted(picked, parent_candidates).int() + 1
    parents = torch.full((b, width), -1, dtype=torch.int32, device=device)
    parents[:, 1 : n + 1] = torch.where(parent_candidates < 0, 0, places)

    tree = DraftTree.padding(root_tokens, width)._replace(parents=parents)
    tree.tokens[:, 1 : n + 1] = table.tokens.gather(1, picked)
    for i in range(1, n + 1):
        parent = parents[:, i : i + 1].long()
        tree.ancestors[:, i : i + 1] |= tree.ancestors.gather(1, parent)
        tree.depths[:, i : i + 1] = tree.depths.gather(1, parent) + 1
    return tree


def as_chains(tree: DraftTree, chosen: Tensor) -> DraftTree:
    """Reduce the chosen trees to the chain of first children, whose nodes come first; the rest is padding.

    tree of [b, W] nodes, chosen [b] bool. The host can follow a chain token by token, as a grammar must.
    """
    b, W = tree.tokens.shape
    device = tree.tokens.device
    nodes = torch.arange(W, device=device)
    order = torch.zeros(b, W, dtype=torch.int64, device=device)  # node of the tree at each place of the chain
    alive = torch.ones(b, 1, dtype=torch.bool, device=device)
    length = torch.ones(b, 1, dtype=torch.int64, device=device)
    for place in range(1, W):
        is_child = (tree.parents == order[:, place - 1 : place]) & (nodes > 0)
        child = torch.where(is_child, nodes, W).amin(dim=1, keepdim=True)
        alive = alive & (child < W)
        order[:, place : place + 1] = torch.where(alive, child, 0)
        length += alive
    on_chain = nodes < length
    chain = DraftTree(
        tree.tokens.gather(1, order),
        torch.where(on_chain, nodes - 1, -1).int(),
        torch.where(on_chain, nodes, 0).int(),
        torch.where(on_chain, torch.ones_like(nodes) << (nodes + 1), 2) - 1 | torch.ones_like(nodes) << nodes,
    )
    return DraftTree(*(torch.where(chosen[:, None], new, old) for new, old in zip(chain, tree, strict=True)))
