"""The real round before the first request: what was captured against the same functions as they are, on random inputs,
and a tree in one forward of the real target against its paths token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.selftest.comparison import in_parts
from eagle_plugin.selftest.failure import failure, without_memory
from eagle_plugin.selftest.tree_paths import logits_differ, paths_of, random_tree
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.dummy_batches import Parts, RandomBatches
from eagle_plugin.sglang.logits import sanitize
from eagle_plugin.sglang.round_comparison import Results, RoundComparison

TREE_PREFIX = 6  # few, so that what a node sees of its tree counts
TREE_REQUESTS = 4
SECOND_PASS = 32  # up to so many captured keys are replayed on two batches each


class RoundTest:
    """Runs rounds of random batches on a server's models and caches."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._random = RandomBatches(parts)
        self._dtype = parts.caches[0][0].dtype
        self._eager = DecodeRound(parts.drafter, parts.verifier, parts.reader)
        self._eager.deferred = parts.decode_round.deferred
        self.longest = 0  # of the accepted paths
        self.fingerprints: list[int] = []  # of each round's accepted tokens and trees: equal on all ranks

    def run(self) -> list[str]:
        """One sentence per thing that differs."""
        parts = (self.tree_against_paths, self.graphs_against_eager)
        return [reason for part in parts for reason in without_memory(part)]

    # --- graphs

    def graphs_against_eager(self) -> list[str]:
        """Every captured function, for every captured batch size, greedy and sampled.

        Without graphs a few rounds run twice: their fingerprints are compared between ranks.
        """
        sizes = self._parts.decode_round.sizes() or [self._random.requests(TREE_REQUESTS)]
        shapes = self._parts.decode_round.shapes or (self._parts.shape, PLAIN)
        keys = [(n, shape, greedy) for n in sizes for shape in shapes for greedy in (True, False)]
        order = [keys[i] for i in torch.randperm(len(keys), generator=self._random.generator).tolist()]
        reasons: dict[str, None] = {}
        for lanes, shape, greedy in order * (2 if len(keys) <= SECOND_PASS else 1):
            for reason in self._one_batch(lanes, shape, greedy):
                reasons[reason] = None
        return list(reasons)

    def _one_batch(self, lanes: int, shape: Shape, greedy: bool) -> list[str]:
        what = f"graphs of {lanes} requests, {'greedy' if greedy else 'sampled'}, trees {shape}"
        b = self._random.requests(lanes)
        prefix = self._random.room(b)
        try:
            with self._random.borrowed(b, prefix + self._parts.shape.reach) as rows:
                lengths = self._random.randint(2, prefix + 1, b)
                state = self._random.state(b)  # before the batch: its template is made in the reader's memory
                batch = self._parts.reader.read(shape, self._random.schedule(rows, lengths, greedy), lanes)
                found, accepted = self._replayed(batch, state)
                wanted = self._as_it_is(batch, state, found, accepted)
                self._remember(found)
                return RoundComparison(what, b, shape, self._dtype).differences(found, wanted)
        except Exception as error:  # of any kind: a round that does not run is as bad as one that differs
            return [failure(what, error)]

    def _replayed(self, batch: RoundBatch, state: DraftState) -> tuple[Results, Accepted]:
        """The captured functions, each on what the one before left in static memory; and what the walk gives as it is.

        The logits stay in the static memory: there may be no room for a copy of them beside what was captured.
        """
        captured = self._parts.decode_round
        drafts = captured.draft(batch, state)
        own_drafts = _clone(drafts)
        output = captured.verify(batch, drafts)
        own_output = _clone(output._replace(logits=output.logits[:0]))._replace(logits=output.logits)
        with self._planted_paths(drafts.tree, output.logits):
            accepted = captured.walk(batch, drafts, output)
            own_accepted = _clone(accepted)
            wanted = self._eager.walk(batch, own_drafts, output)
            after = _clone(captured.extend(batch, accepted, output, state))
        sanitize(output.logits)  # as the walk did
        moved = self._moved(batch, own_accepted)
        return Results(own_drafts, own_output, own_accepted, after, moved), wanted

    def _as_it_is(self, batch: RoundBatch, state: DraftState, found: Results, accepted: Accepted) -> Results:
        """The same functions without graphs, on the same inputs, so that no difference grows from one to the next.

        accepted: what the walk gave.
        """
        lanes = batch.padded_b
        drafts = self._eager.draft(batch, _padded(state, lanes))
        output = self._eager.verify(batch, found.drafts)
        sanitize(output.logits)
        after = self._eager.extend(batch, found.accepted, found.output, state)
        return Results(drafts, output, accepted, after, self._moved(batch, found.accepted))

    @contextlib.contextmanager
    def _planted_paths(self, tree: DraftTree, logits: Tensor) -> Iterator[None]:
        """Inside, the target likes drafted tokens: random inputs would never be accepted, nor rows be moved."""
        lanes, width = tree.tokens.shape
        nodes = logits.view(lanes, width, -1)
        best = torch.cat([part.nan_to_num().amax(dim=1) for part in in_parts(logits)]).view(lanes, width)
        liked = best + 1 + 4 * torch.rand(lanes, width, generator=self._random.generator).to(self._random.device)
        lane, before = torch.arange(lanes, device=self._random.device), []
        for node in range(1, width):
            parent = tree.parents[:, node : node + 1].long().clamp(min=0)
            is_node = tree.parents[:, node] >= 0
            place = lane, parent[:, 0], tree.tokens[:, node].clone()
            old = nodes[place]
            before.append((place, old))
            nodes[place] = torch.where(is_node, liked.gather(1, parent)[:, 0] + node / width, old)
        yield
        for place, old in reversed(before):
            nodes[place] = old

    def _moved(self, batch: RoundBatch, accepted: Accepted) -> list[Tensor]:
        slots = batch.window(0, batch.shape.max_accept_length)
        kept = (torch.arange(slots.shape[1], device=self._random.device) < accepted.lengths[:, None])[: batch.b]
        slots = slots[: batch.b].where(kept, 0)
        ends = self._parts.caches[0], self._parts.caches[-1]
        return [cache[pool.slots(slots)].masked_fill(~kept[:, :, None, None], 0) for cache, pool in ends]

    def _remember(self, results: Results) -> None:
        b = len(results.moved[0])
        self.longest = max(self.longest, int(results.accepted.lengths[:b].max()))
        values = [results.drafts.tree.tokens[:b], results.accepted.tokens[:b], results.accepted.lengths[:b]]
        total = sum(int((x.long().flatten() * torch.arange(1, x.numel() + 1, device=x.device)).sum()) for x in values)
        self.fingerprints.append(total)

    # --- a tree against its paths

    def tree_against_paths(self) -> list[str]:
        """The target's logits after the nodes of a tree, in one forward and path by path in forwards of one node."""
        parts = self._parts
        shape, b = parts.shape, self._random.requests(TREE_REQUESTS)
        with self._random.borrowed(b, TREE_PREFIX + shape.reach) as rows:
            roots = self._random.randint(0, parts.vocabulary, b)
            for length in range(TREE_PREFIX):
                self._one_token(rows, length, self._random.randint(0, parts.vocabulary, b))
            tree = random_tree(roots, shape, parts.vocabulary, self._random.generator)
            batch = self._read(shape, rows, TREE_PREFIX)
            at_once = parts.verifier.forward(batch, tree).logits.view(b, shape.width, -1).clone()
            pairs = []
            for path in paths_of(tree.parents[0].tolist()):
                for depth, node in enumerate(path):
                    one = self._one_token(rows, TREE_PREFIX + depth, tree.tokens[:, node])
                    pairs.append((at_once[:, node], one))
        return logits_differ("a tree in one forward of the target", pairs, self._dtype)

    def _one_token(self, rows: Tensor, length: int, tokens: Tensor) -> Tensor:
        """Logits [b, V] after tokens [b] at this position, whose keys and values are stored."""
        batch = self._read(PLAIN, rows, length)
        return self._parts.verifier.forward(batch, DraftTree.padding(tokens, 1)).logits.clone()

    def _read(self, shape: Shape, rows: Tensor, length: int) -> RoundBatch:
        lengths = torch.full((len(rows),), length, device=self._random.device)
        return self._parts.reader.read(shape, self._random.schedule(rows, lengths, True), len(rows))


def _padded(state: DraftState, lanes: int) -> DraftState:
    """The state of b requests, and of further lanes copies of the first."""
    return tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda x: torch.cat([x, x[:1].expand(lanes - len(x), *x.shape[1:])]), state
    )


def _clone(values: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, values)
