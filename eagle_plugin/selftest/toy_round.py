"""Tests a captured round of a toy head and a toy target on random batches, against the same round as it is.

Both models are lookups in random tables beside one layer of tree attention over a paged cache: no token depends on how
a float was rounded, so tokens have to be equal, and only the outputs of attention are compared with a tolerance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.core.propose import MAX_TOP_M
from eagle_plugin.core.round_start import RoundStart
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.core.tree import DraftTree, chain_ancestors
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels import attention, kv, round_start
from eagle_plugin.kernels.accepted_path import AcceptedPath, read_path
from eagle_plugin.runtime.accept import KVCaches, accept
from eagle_plugin.runtime.graph_emulator import EmulatedCapturer, recording_launches
from eagle_plugin.runtime.graphs import Capturer, CudaCapturer
from eagle_plugin.runtime.round import HeadState, LevelRows, RecurrentLevels, TopM, draft, top_m_of
from eagle_plugin.selftest.trial import TOLERANCE, Check, Trial, places_of

VOCABULARY = 1024  # at most: what depends on its size is tested kernel by kernel
PADDED_B = 4


class ToyResult(NamedTuple):
    """What a round leaves, beside the caches."""

    tree: DraftTree
    accepted: Accepted
    top: TopM  # the next root's most likely children
    features: Tensor  # [b * E, H] of the target's attention
    hidden: Tensor  # [b, H] of the head's


class ToyModel:
    """Logits by lookup, hidden states by attention."""

    def __init__(self, trial: Trial, tables: Tensor) -> None:
        """tables [V, V'] float32: the logits after each token, which the position shifts."""
        model, columns, dtype = trial.model, trial.sizes.table, trial.dtype
        slots, size = PADDED_B * columns + 1, len(tables)
        kv_row = (model.kv_heads, model.head_dim)
        self.tables, self._model = tables, model
        self.keys, self.values = (trial.stored(trial.randn(slots, *kv_row, dtype=dtype), None) for _ in range(2))
        self.caches = [self.keys, self.values]
        if model.latent:
            self.values, self.caches = self.keys[..., : model.latent], [self.keys]
        self._scales: dict[str, Any] = trial.scales
        self._k, self._v = (trial.randn(size, *kv_row, dtype=dtype) for _ in range(2))
        self._q = trial.randn(size, model.heads, model.head_dim, dtype=dtype)

    def __call__(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, start: RoundStart, ancestors: Tensor, tail: int
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, V'] and hidden states [N, H] after tokens, positions and slots [N] int64."""
        if self._model.latent:  # the engine stores it
            self.keys[slots] = self._k[tokens]
        else:
            kv.store_kv(self.keys, self.values, slots, self._k[tokens], self._v[tokens], **self._scales)
        rows = torch.arange(len(ancestors), device=tokens.device)
        out = attention.tree_attention(
            self._q[tokens], self.keys, self.values, start.table, rows, start.prefix_lens, ancestors, tail=tail,
            scale=self._model.head_dim**-0.5, logit_cap=self._model.logit_cap, window=self._model.window,
            chunk=self._model.chunk, **self._scales,
        )  # fmt: skip
        return self.tables[(tokens + positions) % len(self.tables)], out.flatten(1)


class ToyRound:
    """The models, the memory that a captured round reads, and the round."""

    def __init__(self, trial: Trial, greedy: bool) -> None:
        self._trial, self._greedy = trial, greedy
        self.shape = shape = trial.model.tree
        vocabulary = min(VOCABULARY, trial.vocabulary)
        drafted = min(max(vocabulary // 2, shape.topk), trial.draft_vocabulary, vocabulary)
        self._to_target = trial.permutation(vocabulary)[:drafted].contiguous()
        tables = trial.randn(vocabulary, vocabulary) * 3
        # The head nearly knows its target, so that paths are accepted. Its position of a token is lower by one.
        known = tables[:, self._to_target].roll(-1, 0) + trial.randn(vocabulary, drafted) / 2
        self.head, self.target = ToyModel(trial, known), ToyModel(trial, tables)
        columns = trial.sizes.table
        self.start = RoundStart.empty(PADDED_B, shape.reach, columns, trial.device)
        self.start.table.zero_()
        self._engine_table = (trial.permutation(PADDED_B * columns) + 1).view(PADDED_B, columns).int()
        self._keys = trial.randint(-(2**62), 2**62, PADDED_B)
        top_m, hidden = min(MAX_TOP_M, drafted), trial.model.heads * trial.model.value_dim
        self._logp, self._tokens = trial.randn(PADDED_B, top_m), trial.randint(0, drafted, PADDED_B, top_m)
        self._hidden = trial.randn(PADDED_B, hidden, dtype=trial.dtype)
        self._roots = trial.randint(0, vocabulary, PADDED_B)
        self.caches = [*self.target.caches, *self.head.caches]
        self._moved = KVCaches(*places_of(self.target.caches), len(self.target.keys))
        self._chain = chain_ancestors(shape.max_accept_length, trial.device)
        self.b = PADDED_B

    def begin(self) -> None:
        """Fill the memory with another random batch, padded now and then."""
        trial = self._trial
        self.b = b = PADDED_B - int(trial.randint(0, 2, 1))
        sampling = SamplingParams.greedy(b, trial.device) if self._greedy else trial.params(b)
        lengths = trial.randint(1, trial.sizes.prefix, b)
        rows = trial.permutation(PADDED_B)[:b].contiguous()
        round_start.start_round(self.start, lengths, rows, self._engine_table, self._keys, sampling)
        self._roots.copy_(trial.randint(0, len(self.target.tables), PADDED_B))
        self._hidden.copy_(trial.randn(*self._hidden.shape))
        after_roots = self.head.tables[(self._roots + self.start.prefix_lens - 1) % len(self.head.tables)]
        for kept, values in zip(
            (self._logp, self._tokens), after_roots.log_softmax(1).topk(self._logp.shape[1]), strict=True
        ):
            kept.copy_(values)

    def run(self) -> ToyResult:
        """Draft, verify, walk, move, extend: a function of the memory alone."""
        shape, start = self.shape, self.start
        top_m = top_m_of(shape, self._greedy)
        levels = RecurrentLevels(
            shape, HeadState(TopM(self._logp, self._tokens), self._hidden), start.prefix_lens, top_m, self._forward
        )
        keys = None if self._greedy else start.rng_keys
        drafts = draft(shape, self._roots, levels, start.sampling, keys, start.prefix_lens, self._to_target)
        tree, window = drafts.tree, start.window(0, shape.width)
        positions = (start.prefix_lens[:, None] + tree.depths).view(-1)
        logits, features = self.target(
            tree.tokens.view(-1), positions, window.view(-1), start, tree.ancestors, shape.width
        )
        accepted = accept(drafts, logits, start.sampling, start.rng_keys, start.prefix_lens, filters="joint")
        self._moved.move_accepted(window, accepted)
        path = read_path(accepted, start.prefix_lens, shape.width)
        features = features[path.rows.view(-1)]
        return ToyResult(tree, accepted, *self._extend(accepted, path, features))

    def _forward(self, rows: LevelRows) -> tuple[Tensor, Tensor]:
        slots = self.start.window(rows.first_slot, rows.nodes).view(-1)
        logits, hidden = self.head(rows.tokens, rows.positions, slots, self.start, rows.ancestors, rows.tail)
        return logits, hidden + rows.hidden

    def _extend(self, accepted: Accepted, path: AcceptedPath, features: Tensor) -> tuple[TopM, Tensor, Tensor]:
        padded_b, longest = accepted.tokens.shape
        slots = self.start.window(0, longest).view(-1)
        ancestors = self._chain[:longest].expand(padded_b, -1).contiguous()
        logits, hidden = self.head(
            accepted.tokens.view(-1), path.positions.view(-1), slots, self.start, ancestors, longest
        )
        return TopM.of(logits[path.last], self.shape.topk), features, hidden[path.last]


def _captured_round(trial: Trial, greedy: bool) -> None:
    toy = ToyRound(trial, greedy)
    toy.begin()
    with capturing(trial.device) as capturer:
        graph, kept = capturer.capture(toy.run)
        longest = 0
        for number in range(trial.sizes.replays):
            toy.begin()
            before = [cache.clone() for cache in toy.caches]
            graph.replay()
            found = _clone(kept)
            caches = [cache.clone() for cache in toy.caches]
            for cache, old in zip(toy.caches, before, strict=True):
                cache.copy_(old)
            wanted = toy.run()
            _compare(trial, f"batch {number}", _first(found, toy), _first(wanted, toy))
            for cache, replayed in zip(toy.caches, caches, strict=True):
                # Slot 0 is that of padding requests, which write it in any order.
                trial.equal(f"batch {number}, cache", replayed[1:], cache[1:])
            longest = max(longest, int(wanted.accepted.lengths[: toy.b].max()))
    if longest < 2:
        trial.differences.append("no batch accepted a drafted token, wanted one at least: the head knows its target")


def _compare(trial: Trial, batch: str, found: ToyResult, wanted: ToyResult) -> None:
    for part in ("tree", "accepted"):
        pairs = zip(getattr(found, part)._asdict().items(), getattr(wanted, part), strict=True)
        for (name, x), y in pairs:
            trial.equal(f"{batch}, {part}.{name}", x, y)
    trial.equal(f"{batch}, next tokens", found.top.tokens, wanted.top.tokens)
    trial.close(f"{batch}, next log p", found.top.logp, wanted.top.logp, 1e-5, 1e-5)
    for name in ("features", "hidden"):
        trial.close(f"{batch}, {name}", getattr(found, name), getattr(wanted, name), *TOLERANCE[trial.dtype])


def _first(result: ToyResult, toy: ToyRound) -> ToyResult:
    """What is of requests: padding requests write one slot in any order, and read it."""
    rows = len(result.features) // PADDED_B * toy.b
    kept = torch.utils._pytree.tree_map_only(Tensor, lambda x: x[: toy.b], result._replace(features=result.hidden))
    return kept._replace(features=result.features[:rows])  # type: ignore[no-any-return]


def _clone(result: ToyResult) -> ToyResult:
    return torch.utils._pytree.tree_map_only(Tensor, torch.clone, result)  # type: ignore[no-any-return]


@contextlib.contextmanager
def capturing(device: torch.device) -> Iterator[Capturer]:
    """What makes graphs on this device: CUDA, or the emulator, which sees native kernels within the block only."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what the default stream has begun is read on another one
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield CudaCapturer()
            torch.cuda.synchronize(device)
        return
    with recording_launches():
        yield EmulatedCapturer()


CHECKS = (
    Check("a captured greedy round", lambda trial: _captured_round(trial, greedy=True)),
    Check("a captured sampled round", lambda trial: _captured_round(trial, greedy=False)),
)
