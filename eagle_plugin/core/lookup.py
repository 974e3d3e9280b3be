"""Looked-up branches: what followed an earlier occurrence of a request's last tokens, beside the nodes of the head.

Letters in shapes: R rows of requests, N tokens of a history, P tokens of a path, b requests, L a request's committed
length, whose root has position L, C candidates of the head, E steps of a path that a round may take.

A step of a path is right more often than the head alone says. How much more is measured: the head gives the looked-up
token the probability q, so it expects a miss with 1 - q; of steps of one kind, r is the number of misses over the sum
of what the head expected. The token gets the probability 1 - r (1 - q), and its siblings, which share the rest as
before, r times theirs. Kinds ("cells") are told apart by how long the match is and by what the head says of the token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.tree import CandidateTable, DraftTree, chain_ancestors
from eagle_plugin.core.verify import Accepted

MIN_MATCH = 2  # tokens that must be equal: after fewer, another token follows more often than the same
MAX_MATCH = 16  # longer matches are not told apart: the newest one is taken
LENGTHS = (2, 3, 5, 9)  # the least match of each class of lengths
UNREAD, BEST, BELOW, UNLISTED = range(4)  # the head: has no children there; lists the token first; later; not at all
CELLS = 4 * len(LENGTHS)  # kind of the head's answer * 4 + class of the length
PRIOR_WEIGHT = 4.0  # expected misses that the prior counts as
MOST_EXPECTED = 32.0  # of one cell: then both its sums are halved, so that it follows a text that changes
LEAST_RATIO = 0.02  # of misses: no step is taken to be surer


class TokenHistory(NamedTuple):
    """The last tokens of each request, and what was looked up in them; all of it is on the device.

    Row 0 is nobody's: a request with it, or padding, gets no branches and leaves no trace.
    """

    tokens: Tensor  # [R, N] int32: the token of position p in column p % N; below 0 it matches nothing
    begins: Tensor  # [R] int64: first position that is known
    ends: Tensor  # [R] int64: last position that is known, -1 for none
    path: Tensor  # [R, P] int32: what was looked up last
    cells: Tensor  # [R, P] int32: of each step; -1 after the path's end
    doubts: Tensor  # [R, P] float32: 1 - q of each step
    starts: Tensor  # [R] int64: position of the path's first token, -1 without a path
    taken: Tensor  # [R] int32: its first steps that are nodes of the tree
    expected: Tensor  # [R, CELLS] float32: misses that the head alone expected
    missed: Tensor  # [R, CELLS] float32: misses
    counts: Tensor  # [R, 2] int64: nodes that only looked-up paths brought into trees, and how many were accepted
    prior: Tensor  # [CELLS] float32: misses over expected misses, where nothing is known of the request

    @classmethod
    def empty(
        cls, rows: int, window: int, steps: int, prior: Tensor, device: torch.device | str = "cpu"
    ) -> TokenHistory:
        """Nothing known of any request: R is `rows`, N is `window`, P is `steps`; prior [CELLS] float32."""

        def whole(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        sums = torch.zeros(rows, CELLS, device=device)
        return cls(
            tokens=whole(rows, window, value=-1, dtype=torch.int32),
            begins=whole(rows),
            ends=whole(rows, value=-1),
            path=whole(rows, steps, dtype=torch.int32),
            cells=whole(rows, steps, value=-1, dtype=torch.int32),
            doubts=torch.zeros(rows, steps, device=device),
            starts=whole(rows, value=-1),
            taken=whole(rows, dtype=torch.int32),
            expected=sums,
            missed=sums.clone(),
            counts=whole(rows, 2),
            prior=prior.to(device=device, dtype=torch.float32),
        )


def put_tokens(history: TokenHistory, rows: Tensor, first: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Note tokens[i, : lengths[i]] at the positions from first[i] on; rows, first, lengths [b] int64, tokens [b, n].

    Positions after them are no longer known. Where they do not follow what is known, nothing before them is.
    """
    window = history.tokens.shape[1]
    begins, ends, has_row = history.begins[rows], history.ends[rows], rows > 0
    follows = (first <= ends + 1) & (first >= begins)
    history.begins[rows] = torch.where(follows | ~has_row, begins, first)
    history.ends[rows] = torch.where(has_row, first + lengths - 1, ends)
    for i in range(tokens.shape[1]):
        column = (first + i) % window
        old = history.tokens[rows, column]
        history.tokens[rows, column] = torch.where(has_row & (lengths > i), tokens[:, i].int(), old)


def longest_match(history: TokenHistory, rows: Tensor, prefix_lens: Tensor) -> tuple[Tensor, Tensor]:
    """The position of the last token of the longest earlier occurrence of each history's end, and its length.

    rows and prefix_lens [b] int64: positions [b] int64, lengths [b] int64 up to `MAX_MATCH`, 0 without one. Of equally
    long ones it is the newest.
    """
    tokens = history.tokens[rows]
    window = tokens.shape[1]
    L = prefix_lens[:, None]
    begin = torch.maximum(history.begins[rows], prefix_lens - window + 1)[:, None]
    ages = torch.arange(1, window, device=tokens.device)
    places = L - ages  # [b, N - 1], newest first
    run = torch.ones_like(places, dtype=torch.bool)
    lengths = torch.zeros_like(places)
    for i in range(MAX_MATCH):
        last = tokens.gather(1, (L - i).clamp(min=0) % window)
        here = tokens.gather(1, (places - i).clamp(min=0) % window)
        run = run & (places - i >= begin) & (here == last) & (here >= 0)
        lengths += run
    best = (lengths * window - ages).argmax(dim=1, keepdim=True)
    length = lengths.gather(1, best)[:, 0]
    return prefix_lens - best[:, 0] - 1, torch.where(length >= MIN_MATCH, length, 0)


def copied_path(history: TokenHistory, rows: Tensor, prefix_lens: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens [b, E] int64 that may follow the root, how many there are [b], and the length of the match [b].

    A path that reaches the root goes on with its own first token: the text between repeats itself.
    """
    at, matched = longest_match(history, rows, prefix_lens)
    period = (prefix_lens - at).clamp(min=1)[:, None]
    places = at[:, None] + 1 + torch.arange(steps, device=at.device) % period
    window = history.tokens.shape[1]
    tokens = history.tokens[rows].gather(1, places.clamp(min=0) % window).long()
    is_known = (tokens >= 0).cumprod(dim=1).bool() & ((matched > 0) & (rows > 0))[:, None]
    return tokens.where(is_known, 0), is_known.sum(dim=1), matched


def look_up(
    history: TokenHistory,
    table: CandidateTable,
    candidates: int,
    width: int,
    rows: Tensor,
    prefix_lens: Tensor,
    roots: Tensor,
) -> None:
    """Merge the looked-up path of each request into its candidates, and note it for `append_tokens`.

    The table has C = `candidates` candidates of the head and E more places, at least one for each of its levels. The
    step of depth d that is no candidate of the head becomes candidate C + d - 1; a place without one is an impossible
    child of the root. The scores of the head's candidates change as the module says. width: of the trees that the best
    candidates become. rows, prefix_lens and roots [b] int64; a root is noted at its position.
    """
    put_tokens(history, rows, prefix_lens, roots[:, None], torch.ones_like(rows))
    steps = table.scores.shape[1] - candidates
    tokens, count, matched = copied_path(history, rows, prefix_lens, steps)
    b, device = len(rows), rows.device
    prior = history.prior
    ratios = (history.missed[rows] + PRIOR_WEIGHT * prior) / (history.expected[rows] + PRIOR_WEIGHT)
    ratios = ratios.clamp(LEAST_RATIO, 1)
    scores, parents = table.scores[:, :candidates].clone(), table.parents[:, :candidates]

    current = torch.full((b,), -1, dtype=torch.int64, device=device)  # candidate of the path so far
    old, new = (torch.zeros(b, device=device) for _ in range(2))  # its score without and with the path
    # What candidates that leave the path here gain, for each depth; and the scores that they may not exceed.
    on_path = torch.full((b, steps + 1), -2, dtype=torch.int64, device=device)
    gains, ceilings = (torch.zeros(b, steps + 1, device=device) for _ in range(2))
    cells = torch.full((b, steps), -1, dtype=torch.int32, device=device)
    nodes = cells.long()  # candidate of each step
    doubts = torch.zeros(b, steps, device=device)
    for i in range(steps):
        goes_on = count > i
        children = (parents == current[:, None]) & (scores > -torch.inf)
        is_token = children & (table.tokens[:, :candidates] == tokens[:, i : i + 1])
        shared, child = is_token.any(dim=1), is_token.int().argmax(dim=1)
        best = scores.masked_fill(~children, -torch.inf).argmax(dim=1)
        kind = torch.where(shared, torch.where(best == child, BEST, BELOW), UNLISTED)
        kind = torch.where(children.any(dim=1), kind, UNREAD)
        length = (matched + i)[:, None] >= torch.tensor(LENGTHS, device=device)
        cell = kind * len(LENGTHS) + length.sum(dim=1) - 1
        child_score = scores.gather(1, child[:, None])[:, 0]
        q = torch.where(shared, (child_score - old).exp().clamp(max=1), 0)
        doubt = 1 - q
        ratio = ratios.gather(1, cell.clamp(min=0)[:, None])[:, 0]
        gains[:, i] = torch.where(goes_on, new - old + ratio.log(), gains[:, i])
        score = new + torch.log1p(-ratio * doubt)
        is_new = goes_on & ~shared
        place = candidates + i
        table.scores[:, place] = torch.where(is_new, score, -torch.inf)
        table.tokens[:, place] = torch.where(is_new, tokens[:, i], 0)
        table.parents[:, place] = torch.where(is_new, current, -1).int()
        cells[:, i] = torch.where(goes_on, cell, -1).int()
        nodes[:, i] = torch.where(goes_on, torch.where(shared, child, place), -1)
        doubts[:, i] = torch.where(goes_on, doubt, 0)
        is_shared = goes_on & shared
        current = torch.where(goes_on, torch.where(shared, child, place), current)
        old, new = torch.where(is_shared, child_score, old), torch.where(goes_on, score, new)
        on_path[:, i + 1] = torch.where(is_shared, child, -2)
        # The last node of the path that the head has: what is below it gains what the node does.
        gains[:, i + 1] = torch.where(is_shared, new - old, 0)
        ceilings[:, i + 1] = torch.where(is_shared, new, 0)
    _rescore(table, candidates, scores, on_path, gains, ceilings)

    history.path[rows, :steps] = tokens.int()
    history.cells[rows] = -1
    history.cells[rows, :steps] = cells
    history.doubts[rows, :steps] = doubts
    history.starts[rows] = torch.where(count > 0, prefix_lens + 1, -1)
    ranks = table.scores.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    is_node = (nodes >= 0) & (ranks.gather(1, nodes.clamp(min=0)) < width - 1)  # parents are better than children
    history.taken[rows] = is_node.sum(dim=1).int()


def _rescore(
    table: CandidateTable, candidates: int, scores: Tensor, on_path: Tensor, gains: Tensor, ceilings: Tensor
) -> None:
    """Give the head's candidates the gain of the last node of the path that they come from; on_path [b, E + 1]."""
    parents = table.parents[:, :candidates].long()
    at = torch.arange(candidates, device=scores.device).expand_as(parents)
    depth = torch.zeros_like(at)  # of the last node of the path on the way to the root, 0 until one is found
    for _ in range(on_path.shape[1]):  # a way is as long as the levels of the table
        found = (at[:, :, None] == on_path[:, None, 1:]) & (at >= 0)[:, :, None]
        here = torch.where(found.any(dim=2), found.int().argmax(dim=2) + 1, 0)
        depth = torch.maximum(depth, here)
        at = torch.where(at >= 0, parents.gather(1, at.clamp(min=0)), -1)
    is_path = on_path.gather(1, depth) == torch.arange(candidates, device=scores.device)
    ceiling = ceilings.gather(1, depth)
    table.scores[:, :candidates] = torch.where(
        is_path, ceiling, torch.minimum(ceiling, scores + gains.gather(1, depth))
    )


def path_trees(history: TokenHistory, rows: Tensor, roots: Tensor, width: int) -> DraftTree:
    """What `look_up` found last, alone: chains [b, W], of as many steps as it took for nodes; the rest is padding.

    rows and roots [b] int64, width: W, all as `look_up` had them.
    """
    steps, device = min(history.path.shape[1], width - 1), rows.device
    tree = DraftTree.padding(roots, width)
    tree.tokens[:, 1 : steps + 1] = history.path[rows, :steps].long()
    depths = torch.arange(width, dtype=torch.int32, device=device).repeat(len(rows), 1)
    ancestors = chain_ancestors(width, device).repeat(len(rows), 1)
    chains = DraftTree(tree.tokens, depths - 1, depths, ancestors)
    return chains.truncate(1 + history.taken[rows].long())


def append_tokens(history: TokenHistory, rows: Tensor, prefix_lens: Tensor, accepted: Accepted) -> None:
    """Note the accepted tokens of a round, and how its looked-up path fared.

    rows and prefix_lens [b] int64 as the round began. A path that was looked up for another round counts for nothing.
    """
    longest, steps = accepted.tokens.shape[1], history.path.shape[1]
    path, cells, doubts, taken = (x[rows] for x in (history.path, history.cells, history.doubts, history.taken))
    expected, missed, counts = history.expected[rows], history.missed[rows], history.counts[rows]
    is_here = history.starts[rows] == prefix_lens + 1
    right = is_here
    for i in range(steps):
        cell = cells[:, i : i + 1].long().clamp(min=0)
        is_own = (cell[:, 0] < BEST * len(LENGTHS)) | (cell[:, 0] >= UNLISTED * len(LENGTHS))
        in_tree = is_here & is_own & (taken > i)
        counts[:, 0] += in_tree
        if i < longest:
            judged = right & (cells[:, i] >= 0) & (accepted.lengths > i)
            right = judged & (accepted.tokens[:, i] == path[:, i])
            counts[:, 1] += right & in_tree & (accepted.lengths > i + 1)
            expected.scatter_add_(1, cell, torch.where(judged, doubts[:, i], 0)[:, None])
            missed.scatter_add_(1, cell, (judged & ~right).float()[:, None])
    full = expected > MOST_EXPECTED
    history.expected[rows] = torch.where(full, expected / 2, expected)
    history.missed[rows] = torch.where(full, missed / 2, missed)
    history.counts[rows] = counts
    history.starts[rows] = -1
    put_tokens(history, rows, prefix_lens + 1, accepted.tokens, accepted.lengths.long())
