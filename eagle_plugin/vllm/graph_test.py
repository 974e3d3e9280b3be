"""Tests what was captured of a decode step against the same functions as they are, on random inputs, before the first
request."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.round import Drafts, HeadState, TopM
from eagle_plugin.selftest.comparison import Comparison
from eagle_plugin.selftest.failure import differences_of_batches
from eagle_plugin.vllm.batch import DraftStore, RoundBatch
from eagle_plugin.vllm.cache_layout import cache_rows
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.dummy_batches import places_of
from eagle_plugin.vllm.head_forwards import DraftBatch

SHORTEST, LONGEST = 2, 24  # tokens of the requests
Blocks = Any  # RoundTest's: blocks of each group of caches, for b requests of so many positions, or None


class GraphTest:
    """Runs the functions of a `TreeModelRunner`'s step that was captured, twice each."""

    def __init__(self, runner: Any, blocks_for: Blocks, generator: torch.Generator) -> None:
        self._runner, self._blocks_for, self._generator = runner, blocks_for, generator
        # Large inputs are drawn where they are read: on the host they would take as long as all else.
        self._on_device = torch.Generator(runner.device).manual_seed(int(self._number()))
        self._step: DecodeStep = runner._step
        self._caps, self._device = runner._caps, runner.device
        self.longest = 0  # of the accepted paths

    def run(self) -> list[str]:
        """One sentence per thing that differs, of every captured shape and batch size, greedy and sampled.

        Captures took what memory was left, so that the test makes nothing of the size of the logits. A batch for which
        it runs out of memory all the same is `LeftOut`.
        """
        batches = [(b, shape) for b in self._step.sizes() for shape in self._step.shapes_at(b) if shape != PLAIN]
        keys = [(*batch, is_greedy) for batch in batches for is_greedy in (True, False)]
        tests = [(_name(*key), partial(self._differences, *key)) for key in keys]
        plain = ((b, _name(b, PLAIN, True)) for b in self._step.sizes() if self._step.has_plain(b))
        tests += [(name, partial(self._differences_of_plain, b, name)) for b, name in plain]
        forward = self._step._forward
        with nullcontext() if forward is None else forward.ready():
            return differences_of_batches(tests)

    def _differences(self, padded_b: int, shape: Shape, is_greedy: bool) -> list[str]:
        compare = Comparison(_name(padded_b, shape, is_greedy), self._runner.dtype)
        step, requests = self._step, self._requests(padded_b)
        if requests is None:
            return []
        b, lengths, layers = requests
        memory, head_table = step._memory, layers[step._head_layer].slot_table

        # draft
        like, roots = memory.root(b, is_greedy), self._whole(0, self._runner.model_config.get_vocab_size(), b)
        hidden = self._floats(like.state.hidden)
        first = self._floats(like.state.top.logp).log_softmax(-1).sort(descending=True).values
        tokens = self._uniform(*first.shape).argsort(-1)  # of the draft vocabulary, which has at least as many
        state = HeadState(TopM(first, tokens), hidden)
        params, keys = self._draws(b, is_greedy)
        step.begin(self._batch(b, lengths, None), layers)
        trees = DraftBatch(shape, lengths, head_table, params, keys, None)
        drafts = step.draft_tree(trees, roots, state).clone()
        again: Drafts = step._function(("draft", padded_b, shape, is_greedy))().first(b)
        exact = self._same_floats(drafts.scores, again.scores)
        compare.trees(drafts.tree, again.tree, exact)

        # verify
        batch, states = self._batch(b, lengths, drafts), self._states(layers)
        step.begin(batch, layers)
        if step.can_verify():
            ids, positions = self._runner.query_rows()
            ids[: b * shape.width] = drafts.tree.tokens.view(-1).int()
            batch.put_trees(ids, positions)
            self._verify(compare, batch, layers, padded_b)

        # walk
        logits = self._with_likely_drafts(drafts.tree, memory.logits(b, shape.width))
        windows = self._windows(layers, lengths, shape.width)
        accepted, _ = step.walk(batch, logits, params, keys)
        accepted = Accepted(*(values.clone() for values in accepted))
        moved = [rows[slots].clone() for rows, slots, _ in windows]
        kept_states = [rows[slots].clone() for rows, slots, _ in states]
        for rows, slots, before in [*windows, *states]:
            rows[slots] = before
        repeated, _ = step._function(("walk", padded_b, shape, is_greedy))()
        compare.accepted(accepted, Accepted(*(values[:b] for values in repeated)))
        compare.moved("walk", moved, [rows[slots] for rows, slots, _ in windows])
        for x, (rows, slots, _) in zip(kept_states, states, strict=True):
            compare.rows("walk", "states of linear layers", x.flatten(1), rows[slots].flatten(1))
        self.longest = max(self.longest, int(accepted.lengths.max()))

        # extend
        found = step.extend(accepted, [self._floats(memory.features(b, shape.width))], is_greedy)
        state, new_lengths, new_roots = found
        kept, *places = tree_map(torch.clone, (state, new_lengths, new_roots))
        step._function(("extend", padded_b, shape, is_greedy))()
        compare.head(kept, state)
        for name, x, y in zip(("lengths", "roots"), places, (new_lengths, new_roots), strict=True):
            compare.equal("extend", name, x, y)
        return compare.found

    def _differences_of_plain(self, padded_b: int, name: str) -> list[str]:
        compare, requests = Comparison(name, self._runner.dtype), self._requests(padded_b)
        if requests is not None:
            b, lengths, layers = requests
            ids, positions = self._runner.query_rows()
            ids[:b] = self._whole(0, self._runner.model_config.get_vocab_size(), b)
            positions[:b] = lengths
            self._verify(compare, self._batch(b, lengths, None), layers, padded_b)
        return compare.found

    def _requests(self, padded_b: int) -> tuple[int, Tensor, Any] | None:
        """Requests of a padded batch: b, their lengths [b], and what a step reads of their places, by layer.

        None: no request has room for a whole tree, or the caches none for so many.
        """
        step, reach = self._step, self._caps.reach
        longest = min(LONGEST, self._runner.max_model_len - 2 * reach)
        # One place stays empty, where a smaller graph would not take the batch.
        smaller = max((size for size in step.sizes() if size < padded_b), default=0)
        b = padded_b - 1 if padded_b - 1 > smaller else padded_b
        blocks = self._blocks_for(b, longest + 2 * reach) if longest > SHORTEST else None
        if blocks is None:
            return None
        places = places_of(self._runner, blocks, longest + 2 * reach)
        layers = {name: place.as_metadata() for place in places for name in place.layers}
        return b, self._whole(SHORTEST, longest, b), layers

    def _verify(self, compare: Comparison, batch: RoundBatch, layers: Any, padded_b: int) -> None:
        """The target over the rows of a step, whose tokens and positions are where the engine puts them."""
        n, is_plain, forward = batch.b * batch.width, batch.width == 1, self._step._forward
        assert forward is not None
        for case in forward.cases():
            with forward.prepared(n, case):
                self._step.begin(batch, layers, is_plain)
                found = [x[:n].clone() for x in tree_leaves(self._step.verify())]
                again = self._step._function(("verify", padded_b, batch.width, case))()
            for x, y in zip(found, tree_leaves(again), strict=True):
                compare.rows("verify", "states of the target", x, y[:n])

    def _same_floats(self, found: Tensor | None, wanted: Tensor | None) -> bool:
        return found is not None and wanted is not None and torch.equal(found, wanted)

    def _batch(self, b: int, lengths: Tensor, drafts: Drafts | None) -> RoundBatch:
        """A step of requests that all verify these trees, or none."""
        store, names = DraftStore(), [str(i) for i in range(b)]
        counts = np.zeros(b, dtype=np.int64)
        if drafts is not None:
            store.put(names, drafts)
            counts += drafts.shape.width - 1
        return RoundBatch.read(counts, counts + 1, names, lengths, store)

    def _windows(self, layers: Any, lengths: Tensor, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys of one layer per group, the slots [b, W] of the nodes, and the random keys that are in them now."""
        found, context = [], self._runner.compilation_config.static_forward_context
        for group in self._runner._verifier.groups:
            rows = cache_rows(context[group.layer].kv_cache).keys
            positions = lengths[:, None] + torch.arange(width, device=self._device)
            slots = layers[group.layer].slot_table.gather(1, positions).long()
            before = self._contents(rows[slots])
            rows[slots] = before
            found.append((rows, slots, before))
        return found

    def _states(self, layers: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of one linear layer a part of what the convolution reads next and one head's state, as of `_windows`.

        What other layers left in the same blocks is no state: all others are zero.
        """
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for name, caches in self._runner.linear.caches().items():
            slots = layers[name].slots
            for cache in caches:
                cache.index_fill_(0, slots, 0.0)
            if not found:
                parts = caches.pasts[:, :16], caches.states[:, :1]
                found = [(part, slots, self._floats(part[slots])) for part in parts]
        for part, slots, before in found:
            part[slots] = before
        return found

    def _with_likely_drafts(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Fill logits [b * W, V] in place, so that drafted tokens are likely: random ones would never be accepted,
        nor keys be moved."""
        b, width = tree.tokens.shape
        nodes = logits.normal_(generator=self._on_device).view(b, width, -1)
        request, added = torch.arange(b, device=self._device), 6 + 4 * self._uniform(b, width)
        for node in range(1, width):
            nodes[request, tree.parents[:, node].long().clamp(min=0), tree.tokens[:, node]] += added[:, node]
        return logits

    def _draws(self, b: int, is_greedy: bool) -> tuple[SamplingParams, Tensor | None]:
        if is_greedy:
            return SamplingParams.greedy(b, self._device), None
        params = SamplingParams.of(b, top_p=0.95, device=self._device)
        return params._replace(temperatures=0.5 + self._uniform(b)), self._whole(0, 2**40, b)

    def _whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self._device)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator).to(self._device)

    def _floats(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, memory_format=torch.contiguous_format).normal_(generator=self._on_device)

    def _contents(self, like: Tensor) -> Tensor:
        """Random keys for a cache: bytes below 0x7c are finite in both kinds of 8-bit floats, kept as bytes."""
        return self._floats(like) if like.is_floating_point() else self._whole(0, 0x7C, *like.shape).to(like.dtype)

    def _number(self) -> Tensor:
        return torch.randint(0, 2**31, (), generator=self._generator)


def _name(padded_b: int, shape: Shape, is_greedy: bool) -> str:
    return f"graphs of {padded_b} requests, {shape}, {'greedy' if is_greedy else 'sampled'}"
