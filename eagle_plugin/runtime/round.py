"""Drafts a tree level by level, accepts a path of it, moves its cache rows: a decode round, the same in both engines.

An adapter reads its engine's batch, runs the engine's models and hands tensors to the functions here. Letters in
shapes: b requests, L tokens of a request that have keys and values (the root, its last token, comes after them), W
nodes of a tree, E = `Shape.max_accept_length`, M tokens of a proposal list, F nodes of a level, K children per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eagle_plugin.core.propose import MAX_TOP_M
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import CandidateTable, DraftTree, Frontier
from eagle_plugin.kernels.lookup import look_up
from eagle_plugin.kernels.sampling import SamplingParams, propose
from eagle_plugin.kernels.tree import grow_level, grow_levels, select_tree, topk_log_softmax, unwritten_table
from eagle_plugin.runtime.lookups import Lookup


class Drafts(NamedTuple):
    """What the target verifies: a tree per request, and its caps."""

    tree: DraftTree  # [b, W]
    shape: Shape
    scores: Tensor | None = None  # [b, C] float32: of all candidates, for `policy.path_sums`; None where not kept

    @classmethod
    def plain(cls, root_tokens: Tensor, width: int = 1) -> Drafts:
        """Roots without drafts: plain decoding through the same code; root_tokens [b]."""
        tree = DraftTree.padding(root_tokens.long(), width)
        return cls(tree, PLAIN._replace(width=width))

    def take(self, index: Tensor) -> Drafts:
        """The drafts of these requests, in this order; index [n] int64."""
        scores = None if self.scores is None else self.scores[index]
        return Drafts(self.tree.take(index), self.shape, scores)

    def first(self, b: int) -> Drafts:
        """The drafts of the first b requests: views."""
        tree = DraftTree(*(values[:b] for values in self.tree))
        scores = None if self.scores is None else self.scores[:b]
        return Drafts(tree, self.shape, scores)

    def clone(self) -> Drafts:
        """The same in memory of their own."""
        return self._replace(
            tree=DraftTree(*(x.clone() for x in self.tree)),
            scores=None if self.scores is None else self.scores.clone(),
        )

    def truncate(self, sizes: Tensor) -> Drafts:
        """The first sizes[i] nodes of tree i, the rest padding; sizes [b] int64."""
        return self._replace(tree=self.tree.truncate(sizes))

    def resize(self, width: int) -> Drafts:
        """Trees of another width: the last nodes go, or padding comes."""
        return self._replace(tree=self.tree.resize(width), shape=self.shape._replace(width=width))

    @classmethod
    def concatenate(cls, parts: Sequence[Drafts]) -> Drafts:
        """The requests of several drafts one after the other, under the largest caps of any part."""
        return cls(
            DraftTree.concatenate([part.tree for part in parts]),
            Shape(*(max(caps) for caps in zip(*(part.shape for part in parts), strict=True))),
        )


class TopM(NamedTuple):
    """The most likely tokens after each row of the head, in the head's own vocabulary, best first."""

    logp: Tensor  # [R, M] float32
    tokens: Tensor  # [R, M] int64

    @classmethod
    def of(cls, logits: Tensor, m: int) -> TopM:
        """The m most likely tokens of each row of logits [R, V], or all of a smaller vocabulary."""
        return cls(*topk_log_softmax(logits, min(m, logits.shape[1])))


class HeadState(NamedTuple):
    """What the head leaves after the last accepted token of each request, for the next round."""

    # [b, M]: the root's children are chosen from these; [b, D, M] where the head listed all levels as it read.
    top: TopM
    hidden: Tensor  # [b, H]; [b, D, H], of the rows of all levels, where a node's list depends on its own token


class TreeRows(NamedTuple):
    """The query rows of a forward over draft trees: R rows per request, keys in `tail` slots after its L tokens."""

    requests: Tensor  # [b] int64: row of the engine's table of cache slots
    prefix_lens: Tensor  # [b] int64: L; these keys are visible to every row
    ancestors: Tensor  # [b, R] int64 holding uint64 bits: bit j: the row sees the key in slot L + j
    tail: int


class LevelRows(NamedTuple):
    """The nodes of one level, as the rows that the head reads to propose their children."""

    tokens: Tensor  # [b * F] int64: ids of the target
    positions: Tensor  # [b * F] int64
    hidden: Tensor  # [b * F, H]: the head's state of each node's parent
    ancestors: Tensor  # [b, F] int64, as in `TreeRows`
    first_slot: int  # slot L + first_slot + j takes the keys and values of row j

    @property
    def nodes(self) -> int:
        """F."""
        return self.ancestors.shape[1]

    @property
    def tail(self) -> int:
        """Slots after L that hold keys once these rows are written."""
        return self.first_slot + self.nodes


class HeadForward(Protocol):
    """One forward of an engine's draft head over the nodes of a level: logits [b * F, V] and hidden [b * F, H]."""

    def __call__(self, rows: LevelRows) -> tuple[Tensor, Tensor]: ...


class LevelSource(Protocol):
    """Where the tokens of a tree's levels come from, level by level."""

    def root(self) -> TopM:
        """The most likely tokens after the root, [b, M]."""
        ...

    def children(self, level: int, frontier: Frontier) -> TopM:
        """The most likely tokens [b * F, M] after the frontier's nodes, which are of level - 1; level is 2 or more."""
        ...


class RecurrentLevels:
    """EAGLE-2 and EAGLE-3: one forward of the head per level, each node with its parent's hidden state.

    EAGLE shifts by one: the head's row at position j reads token j + 1 and the state of position j. So a node of depth
    d is a row of the head at position L + d - 1, and a row of the target at position L + d.
    """

    def __init__(self, shape: Shape, state: HeadState, lengths: Tensor, top_m: int, forward: HeadForward) -> None:
        """lengths [b] int64 is L of each request; top_m is how many tokens to list per node."""
        self._topk, self._top_m = shape.topk, top_m
        self._top, self._hidden = state.top, state.hidden[:, None]  # [b, nodes of the level before, H]
        self._lengths, self._forward = lengths, forward

    def root(self) -> TopM:
        """The tokens that the head listed after the last accepted token."""
        return self._top

    def children(self, level: int, frontier: Frontier) -> TopM:
        """Run the head over the frontier and list its most likely tokens."""
        b, count = frontier.tokens.shape
        parents = frontier.parent_rows[:, :, None].expand(b, count, self._hidden.shape[-1])
        logits, hidden = self._forward(
            LevelRows(
                tokens=frontier.tokens.view(-1),
                positions=(self._lengths + (level - 2)).repeat_interleave(count),
                hidden=self._hidden.gather(1, parents).view(b * count, -1),
                ancestors=frontier.ancestors,
                first_slot=(level - 2) * self._topk,
            )
        )
        self._hidden = hidden.view(b, count, -1)
        return TopM.of(logits, self._top_m)


def top_m_of(shape: Shape, greedy: bool) -> int:
    """How many tokens to list per node: greedy requests take their children only, others those with the most noise."""
    return shape.topk if greedy else MAX_TOP_M


def draft(
    shape: Shape,
    root_tokens: Tensor,
    levels: LevelSource | TopM,
    sampling: SamplingParams,
    rng_keys: Tensor | None,
    lengths: Tensor,
    draft_to_target: Tensor | None,
    chains: Tensor | None = None,
    lookup: Lookup | None = None,
) -> Drafts:
    """Draft one tree per request: levels from the source, then the best nodes of all levels.

    levels: a source, or the lists of all levels [b, D, M], which are the same for all nodes of a level. root_tokens [b]
    int64; sampling, rng_keys [b] int64 (None when all requests are greedy) and lengths [b] int64 (L) have one row per
    request: they are what the target will draw by. draft_to_target [draft vocabulary] int64 maps to target ids (None:
    the same ids). chains [b] bool marks requests whose nodes get one child only, the best. lookup: where branches are
    looked up, which must not be in chains.
    """
    builder = TreeBuilder(shape, sampling, rng_keys, lengths, draft_to_target, chains, lookup)
    if isinstance(levels, TopM):
        builder.add_levels(levels)
    else:
        frontier = builder.add_level(1, levels.root(), None)
        for level in range(2, shape.steps + 1):
            frontier = builder.add_level(level, levels.children(level, frontier), frontier)
    return Drafts(builder.select(root_tokens), shape, builder.table.scores)


class TreeBuilder:
    """The candidates of one round of b requests."""

    def __init__(
        self,
        shape: Shape,
        sampling: SamplingParams,
        rng_keys: Tensor | None,
        lengths: Tensor,
        draft_to_target: Tensor | None,
        chains: Tensor | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """The arguments are those of `draft`."""
        self._shape, self._sampling, self._rng_keys, self._lengths = shape, sampling, rng_keys, lengths
        self._draft_to_target, self._chains = draft_to_target, chains
        self._b = len(sampling.temperatures)
        self._lookup, steps = lookup, 0 if lookup is None else shape.steps
        # The levels write the head's candidates: one row of children each for the root and for every draft slot. After
        # them comes a place for every step of a looked-up path.
        device = sampling.temperatures.device
        self.table: CandidateTable = unwritten_table(self._b, shape.candidates + steps, device)

    def add_level(self, level: int, top: TopM, previous: Frontier | None) -> Frontier:
        """Propose the children of a frontier (None: of the root) from the head's most likely tokens [b * F, M] there.

        Returns the frontier of the next level, which has no nodes after the last level.
        """
        topk = self._shape.topk
        first = 0 if previous is None else 1 + (level - 2) * topk  # of the frontier among the nodes with children
        logp, tokens = self._children_of(top, level - 1)
        if level == 1:
            logp = self._without_head(logp)
        next_topk = topk if level < self._shape.steps else 0
        return grow_level(self.table, first * topk, level, logp, tokens, previous, next_topk)

    def add_levels(self, top: TopM) -> None:
        """The same for all levels at once, from their lists [b, D, M]."""
        steps, topk, _ = self._shape
        depths = torch.arange(steps, device=top.logp.device)
        if topk > 1 and steps > 1:  # a list for each node that has children
            depths = (torch.arange(1 + self._shape.draft_slots, device=top.logp.device) + topk - 1) // topk
            top = TopM(*(values[:, depths] for values in top))
        lists = TopM(*(values.flatten(0, 1) for values in top))
        logp, tokens = self._children_of(lists, depths)
        grow_levels(self.table, steps, topk, self._without_head(logp), tokens)

    def _children_of(self, top: TopM, depths: int | Tensor) -> tuple[Tensor, Tensor]:
        """Scores and tokens [b, F, K] of the children of F nodes of these depths ([F] int64); top has [b * F, M]."""
        topk, rows = self._shape.topk, len(top.logp) // self._b
        shape = (self._b, rows, topk)
        if self._rng_keys is None:
            logp, tokens = (values[:, :topk].contiguous() for values in top)
            tokens = tokens if self._draft_to_target is None else self._draft_to_target[tokens]
        else:
            keys = self._rng_keys.repeat_interleave(rows)
            positions = (self._lengths[:, None] + depths).expand(self._b, rows).contiguous().view(-1)
            logp, tokens = propose(*top, self._sampling.for_rows(rows), keys, positions, topk, self._draft_to_target)
        logp = logp.view(shape)
        if self._chains is not None:
            logp[:, :, 1:] = logp[:, :, 1:].masked_fill(self._chains[:, None, None], -torch.inf)
        return logp, tokens.view(shape)

    def _without_head(self, logp: Tensor) -> Tensor:
        """Scores [b, F, K] of the roots' children, impossible where no node may be the head's: so are all below."""
        return logp if self._lookup is None else logp.masked_fill(self._lookup.alone[:, None, None], -torch.inf)

    def select(self, root_tokens: Tensor) -> DraftTree:
        """The best nodes as one tree per request; root_tokens [b] int64."""
        if self._lookup is not None:
            shape, (history, rows, _) = self._shape, self._lookup
            look_up(history, self.table, shape.candidates, shape.width, rows, self._lengths, root_tokens)
        return select_tree(self.table, root_tokens, self._shape.width)
