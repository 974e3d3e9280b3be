"""Tests the real round before the first request: what was captured against the same functions as they are, on random
inputs, and a tree in one forward of the real target against its paths token by token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.selftest.comparison import Comparison, in_parts
from eagle_plugin.selftest.failure import differences_of_batches, without_memory
from eagle_plugin.selftest.tree_paths import allowed_difference, along, logits_differ, paths_of, random_tree
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.decode_round import DecodeRound
from eagle_plugin.sglang.drafter import DraftState
from eagle_plugin.sglang.dummy_batches import Parts, RandomBatches
from eagle_plugin.sglang.logits import sanitize
from eagle_plugin.sglang.verifier import TargetOutput

TREE_PREFIX = 6  # few, so that what a node sees of its tree counts
TREE_REQUESTS = 4
SECOND_PASS = 32  # up to so many captured keys are replayed on two batches each


class Results(NamedTuple):
    """What one round's functions gave, each on what the captured function before it gave."""

    drafts: Drafts
    output: TargetOutput
    accepted: Accepted
    state: DraftState  # after the round
    moved: list[Tensor]  # [b, E, heads, dim]: keys and values of the accepted tokens, in some layers

    def of(self, b: int, shape: Shape) -> Results:
        """The same of the first b requests alone."""
        first, nodes = partial(_first, b), partial(_first, b * shape.width)
        tree = self.drafts._replace(tree=first(self.drafts.tree))
        output = self.output._replace(logits=nodes(self.output.logits), features=nodes(self.output.features))
        return Results(tree, output, first(self.accepted), first(self.state), self.moved)


class RoundTest:
    """Runs rounds of random batches on a server's models and caches."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._random = RandomBatches(parts)
        self._dtype = parts.dtype
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
        captured = self._parts.decode_round
        eager = [(self._random.requests(TREE_REQUESTS), shape) for shape in (self._parts.shape, PLAIN)]
        batches = [(n, shape) for n in captured.sizes() for shape in captured.shapes_at(n)] or eager
        keys = [(n, shape, greedy) for n, shape in batches for greedy in (True, False)]
        order = [keys[i] for i in torch.randperm(len(keys), generator=self._random.generator).tolist()]
        repeated = order * (2 if len(keys) <= SECOND_PASS else 1)
        return differences_of_batches((_name(*key), partial(self._one_batch, *key)) for key in repeated)

    def _one_batch(self, padded_b: int, shape: Shape, greedy: bool) -> list[str]:
        b = self._random.requests(padded_b)
        prefix = self._random.room(b)
        with self._random.borrowed(b, prefix + self._parts.shape.reach) as rows:
            lengths = self._random.randint(2, prefix + 1, b)
            state = self._random.state(b)  # before the batch: its template is made in the reader's memory
            batch = self._parts.reader.read(shape, self._random.schedule(rows, lengths, greedy), padded_b)
            sequences = self._random.sequences(lengths, state.roots)
            self._begin(rows, sequences)
            found, accepted = self._replayed(batch, state)
            self._begin(rows, sequences)
            wanted = self._as_it_is(batch, state, found, accepted)
            self._remember(found)
            compare = Comparison(_name(padded_b, shape, greedy), self._dtype)
            return differences(compare, found.of(b, shape), wanted.of(b, shape))

    def _begin(self, rows: Tensor, sequences: list[list[int]]) -> None:
        """What branches are looked up in, of the requests in these rows."""
        if (lookups := self._parts.drafter.lookups) is not None:
            lookups.begin(rows, sequences)

    def _replayed(self, batch: RoundBatch, state: DraftState) -> tuple[Results, Accepted]:
        """The captured functions, each on what the one before left in static memory; and what the walk gives as it is.

        The logits stay in the static memory: there may be no room for a copy of them beside what was captured.
        """
        captured = self._parts.decode_round
        drafts = captured.draft(batch, state)
        own_drafts = _clone(drafts)
        output = captured.verify(batch, drafts)
        own_output = _clone(output._replace(logits=output.logits[:0]))._replace(logits=output.logits)
        with self._likely_drafts(drafts.tree, output.logits):
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
        drafts = self._eager.draft(batch, _padded(state, batch.padded_b))
        output = self._eager.verify(batch, found.drafts)
        sanitize(output.logits)
        after = self._eager.extend(batch, found.accepted, found.output, state)
        return Results(drafts, output, accepted, after, self._moved(batch, found.accepted))

    @contextlib.contextmanager
    def _likely_drafts(self, tree: DraftTree, logits: Tensor) -> Iterator[None]:
        """Inside, drafted tokens are the most likely ones: random inputs would never be accepted, nor rows be moved."""
        padded_b, width = tree.tokens.shape
        nodes = logits.view(padded_b, width, -1)
        best = torch.cat([part.nan_to_num().amax(dim=1) for part in in_parts(logits)]).view(padded_b, width)
        likely = best + 1 + 4 * torch.rand(padded_b, width, generator=self._random.generator).to(self._random.device)
        request, before = torch.arange(padded_b, device=self._random.device), []
        for node in range(1, width):
            parent = tree.parents[:, node : node + 1].long().clamp(min=0)
            is_node = tree.parents[:, node] >= 0
            place = request, parent[:, 0], tree.tokens[:, node].clone()
            old = nodes[place]
            before.append((place, old))
            nodes[place] = torch.where(is_node, likely.gather(1, parent)[:, 0] + node / width, old)
        yield
        for place, old in reversed(before):
            nodes[place] = old

    def _moved(self, batch: RoundBatch, accepted: Accepted) -> list[Tensor]:
        slots = batch.window(0, batch.shape.max_accept_length)
        kept = (torch.arange(slots.shape[1], device=self._random.device) < accepted.lengths[:, None])[: batch.b]
        slots = slots[: batch.b].where(kept, 0)
        ends = self._parts.caches[0], self._parts.caches[-1]
        moved = [(cache[pool.slots(slots)], pool.buffers) for cache, pool in ends]
        # SGLang keeps 8-bit floats as bytes.
        values = [rows if rows.is_floating_point() else rows.view(pool.dtype).float() for rows, pool in moved]
        return [rows.masked_fill(~kept[:, :, None, None], 0) for rows in values]

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

            def token(tokens: Tensor, depth: int) -> Tensor:
                return self._one_token(rows, TREE_PREFIX + depth, tokens)

            pairs = [pair for path in paths_of(tree.parents[0].tolist()) for pair in along(path, tree, at_once, token)]
        return logits_differ(
            "a tree in one forward of the target", pairs, allowed_difference(self._dtype, parts.quantization)
        )

    def _one_token(self, rows: Tensor, length: int, tokens: Tensor) -> Tensor:
        """Logits [b, V] after tokens [b] at this position, whose keys and values are stored."""
        batch = self._read(PLAIN, rows, length)
        return self._parts.verifier.forward(batch, DraftTree.padding(tokens, 1)).logits.clone()

    def _read(self, shape: Shape, rows: Tensor, length: int) -> RoundBatch:
        lengths = torch.full((len(rows),), length, device=self._random.device)
        return self._parts.reader.read(shape, self._random.schedule(rows, lengths, True), len(rows))


def differences(compare: Comparison, found: Results, wanted: Results) -> list[str]:
    """One sentence per function whose results differ; both of the requests alone."""
    exact = compare.rows("verify", "logits", found.output.logits, wanted.output.logits)
    compare.rows("verify", "features", found.output.features, wanted.output.features)
    compare.accepted(found.accepted, wanted.accepted)
    compare.moved("extend", found.moved, wanted.moved)
    compare.equal("extend", "roots", found.state.roots, wanted.state.roots)
    exact = compare.head(found.state.head, wanted.state.head, exact)
    tree, tree_ = found.drafts.tree, wanted.drafts.tree
    compare.equal("draft", "tree.tokens of the roots", tree.tokens[:, 0], tree_.tokens[:, 0])
    compare.trees(tree, tree_, exact)
    return compare.found


def _name(padded_b: int, shape: Shape, greedy: bool) -> str:
    return f"graphs of {padded_b} requests, {'greedy' if greedy else 'sampled'}, trees {shape}"


def _padded(state: DraftState, padded_b: int) -> DraftState:
    """The state of b requests, and in the places of padding copies of the first."""
    return tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda x: torch.cat([x, x[:1].expand(padded_b - len(x), *x.shape[1:])]), state
    )


def _first(n: int, values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x[:n], values)


def _clone(values: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, values)
