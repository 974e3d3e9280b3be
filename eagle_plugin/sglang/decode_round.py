"""Runs a decode round by four functions: draft, verify, walk, extend; replayed where captured, else as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import read_path
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.accept import without_spare_places
from eagle_plugin.runtime.captured_rounds import CapturedRounds, FunctionKey
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.graphs import Capturer
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.runtime.round_memory import OneRequest, RoundMemory
from eagle_plugin.sglang.adapters import Adapters
from eagle_plugin.sglang.batch import BatchReader, RoundBatch
from eagle_plugin.sglang.deferred_extend import DeferredTokens
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter
from eagle_plugin.sglang.logits import sanitize
from eagle_plugin.sglang.verifier import TargetOutput, TreeVerifier


class DecodeRound(CapturedRounds[RoundMemory]):
    """The functions of a round; what was captured reads the batch in the static memory of its `BatchReader`."""

    def __init__(
        self, drafter: TreeDrafter, verifier: TreeVerifier, reader: BatchReader, adapters: Adapters | None = None
    ) -> None:
        """adapters: of the target's captured forwards; None without LoRA."""
        super().__init__()
        self._drafter, self._verifier, self._reader, self._adapters = drafter, verifier, reader, adapters
        self.deferred: DeferredTokens | None = None  # where the head reads the tokens of plain rounds later

    def is_captured(self, batch: RoundBatch) -> bool:
        """Whether the results of this round lie in memory that the next round overwrites."""
        return not batch.is_eager and self._has_graphs(batch.padded_b, batch.shape)

    def draft(self, batch: RoundBatch, state: DraftState) -> Drafts:
        """Draft a tree per request of the padded batch; state is what the round before left, of b requests."""
        key = _key("draft", batch)
        if self._is_captured(key):
            self._memory.put_state(state.head)
            self._memory.put("roots", state.roots)
        return self._run(key, partial(self._draft, batch, state))

    def verify(self, batch: RoundBatch, drafts: Drafts) -> TargetOutput:
        """One forward of the target over the trees, of the padded batch or of fewer requests."""
        key = _key("verify", batch)
        tree = drafts.tree if self._is_captured(key) else drafts.tree.padded(batch.padded_b)
        return self._run(key, partial(self._verifier.forward, batch, tree))

    def walk(self, batch: RoundBatch, drafts: Drafts, output: TargetOutput) -> Accepted:
        """Accept paths, for requests that ask for no more than temperature and filters."""
        return self._run(_key("walk", batch), partial(self._walk, batch, drafts, output))

    def extend(self, batch: RoundBatch, accepted: Accepted, output: TargetOutput, state: DraftState) -> DraftState:
        """Move the accepted keys and values, and feed the accepted tokens to the head; accepted may have b requests.

        state is what the round began with: a plain round whose tokens the head reads later leaves it as it is. Returns
        what the next round begins with, of B requests.
        """
        if batch.shape == PLAIN and self.deferred is not None:
            return self._defer(self.deferred, batch, accepted, output, state)
        key = _key("extend", batch)
        if not self._is_captured(key):
            accepted = without_spare_places(accepted)
        self._provide(key, accepted)
        return self._run(key, partial(self._extend, batch, accepted, output))

    def path_sums(self, batch: RoundBatch, sums: PathSums, scores: Tensor) -> Tensor:
        """`sums` of the drafts of this round, whose scores these are: of b requests, or of the padded batch. It comes
        last in a round, before another one drafts."""
        return self._run(_key("sums", batch), lambda: sums(scores))

    def capture(
        self,
        capturer: Capturer,
        caps: Shape,
        shapes: Sequence[Shape],
        sizes: list[int],
        graph_memory: GraphMemory,
        with_sums: bool = False,
        engine_logits: Callable[[int, int], Tensor | None] = lambda rows, vocabulary: None,
    ) -> None:
        """Capture the rounds of these shapes within `caps` for these batch sizes, as far as one `fits` the other.

        with_sums: capture path sums too, which a policy over these shapes reads. engine_logits: gives the engine's
        memory [rows, vocabulary] for the target's logits, if it has one (`RoundMemory`).
        """

        def allocate(most: int, rows: int) -> RoundMemory:
            _, output, _, state = self.padding_round(caps)
            logits, features = output.logits[:1].clone(), output.features[:1].clone()  # kept: no row more than needed
            drafts = Drafts.plain(state.roots, caps.width)
            like = OneRequest(logits, features, state.head, drafts)
            return RoundMemory(caps, most, like, rows, engine_logits(rows, logits.shape[1]))

        if self._adapters is not None:
            self._adapters.use_static_memory(max(sizes), caps.width)
        self._capture_sizes(shapes, sizes, graph_memory, allocate, partial(self._capture_size, capturer, with_sums))
        if self._adapters is not None:
            self._adapters.forget()

    def _capture_size(self, capturer: Capturer, with_sums: bool, size: int) -> None:
        """All functions of one batch size, those that come first in a round before the others (`CudaCapturer`)."""
        capture, memory = self.functions.capture, self._memory
        batches = [
            self._reader.padding(shape, size, greedy) for shape in self.shapes_at(size) for greedy in (True, False)
        ]

        def draft(batch: RoundBatch) -> Drafts:
            drafts = self._draft(batch, DraftState(memory.state(size), memory.view("roots", size)))
            return drafts._replace(tree=memory.put_fields("tree", drafts.tree))

        def verify(batch: RoundBatch) -> TargetOutput:
            logits = memory.logits(size, batch.shape.width)
            output = self._verifier.forward(batch, memory.tree(size, batch.shape.width), logits)
            if not memory.holds("logits", output.logits):
                logits.copy_(output.logits)
            return output._replace(logits=logits, features=memory.put("features", output.features))

        def walk(batch: RoundBatch, drafts: Drafts, output: TargetOutput) -> Accepted:
            return memory.put_fields("accepted", self._walk(batch, drafts, output))

        def provide_tree(batch: RoundBatch) -> None:
            """The calls before a capture compute: what they read must be a tree of this width."""
            roots = torch.zeros(size, dtype=torch.int64, device=batch.prefix_lens.device)
            memory.put_fields("tree", DraftTree.padding(roots, batch.shape.width))

        drafted = [capture(capturer, _key("draft", batch), partial(draft, batch)) for batch in batches]
        outputs: dict[int, TargetOutput] = {}  # by width: shapes of one width share it, greedy and sampled batches too
        for batch in batches:
            if batch.shape.width not in outputs:
                provide_tree(batch)
                if self._adapters is not None:
                    self._adapters.prepare_padding(size, batch.shape.width)
                outputs[batch.shape.width] = capture(capturer, _key("verify", batch), partial(verify, batch))
        for batch, drafts in zip(batches, drafted, strict=True):
            output = outputs[batch.shape.width]
            provide_tree(batch)
            accepted = capture(capturer, _key("walk", batch), partial(walk, batch, drafts, output))
            extend: Callable[[], Any] = partial(self._extend, batch, accepted, output)
            if batch.shape == PLAIN and self.deferred is not None:
                extend = partial(self._add_deferred, self.deferred, batch, accepted, output)
            capture(capturer, _key("extend", batch), extend)
        for batch, drafts in zip(batches, drafted, strict=True):
            if with_sums and drafts.scores is not None:
                sums = self._sums_of(batch.shape, drafts.scores, self.shapes)
                capture(capturer, _key("sums", batch), partial(sums, drafts.scores))

    def padding_round(self, shape: Shape) -> tuple[DraftTree, TargetOutput, Accepted, DraftState]:
        """A round of padding alone, as one request: what widths and dtypes the values of this shape have."""
        batch = self._reader.padding(shape, 1, is_greedy=False)
        device, longest = batch.prefix_lens.device, shape.max_accept_length
        tree = DraftTree.padding(torch.zeros(1, dtype=torch.int64, device=device), shape.width)
        output = self._verifier.forward(batch, tree)
        index = torch.zeros(1, longest, dtype=torch.int32, device=device)
        accepted = Accepted(index, torch.ones_like(index[:, 0]), index.long())
        path = read_path(accepted, batch.prefix_lens, shape.width)
        state = self._drafter.extend(batch, accepted, path, output.features[:1].repeat(longest, 1))
        return tree, output, accepted, state

    # The functions. Those above that are captured differ from these only in where their values lie.

    def _draft(self, batch: RoundBatch, state: DraftState) -> Drafts:
        return Drafts.plain(state.roots) if batch.shape == PLAIN else self._drafter.draft_tree(batch, state)

    def _walk(self, batch: RoundBatch, drafts: Drafts, output: TargetOutput) -> Accepted:
        sanitize(output.logits)
        return self._verifier.walk(batch, drafts, output.logits)

    def _extend(self, batch: RoundBatch, accepted: Accepted, output: TargetOutput) -> DraftState:
        self._verifier.commit(batch, accepted, output)
        self._append(batch, accepted)
        path = read_path(accepted, batch.prefix_lens, batch.shape.width)
        return self._drafter.extend(batch, accepted, path, output.features[path.rows.view(-1)])

    def _defer(
        self, deferred: DeferredTokens, batch: RoundBatch, accepted: Accepted, output: TargetOutput, state: DraftState
    ) -> DraftState:
        deferred.rounds += 1
        key = _key("extend", batch)
        self._provide(key, accepted)
        self._run(key, partial(self._add_deferred, deferred, batch, accepted, output))
        return DraftState(state.head, accepted.tokens[:, 0])

    def _add_deferred(
        self, deferred: DeferredTokens, batch: RoundBatch, accepted: Accepted, output: TargetOutput
    ) -> None:
        self._verifier.commit_states(accepted, output)  # keys are where they belong: a plain round has one node
        self._append(batch, accepted)
        deferred.add(batch, accepted, output.features)

    def _append(self, batch: RoundBatch, accepted: Accepted) -> None:
        if (lookups := self._drafter.lookups) is not None:
            lookups.append(batch.requests, batch.prefix_lens, accepted)

    def _provide(self, key: FunctionKey, accepted: Accepted) -> None:
        """Put paths that did not come from the captured walk where the captured extend reads them."""
        if self._is_captured(key) and not self._memory.holds("accepted.tokens", accepted.tokens):
            self._memory.put_accepted(accepted, key[1])


def _key(phase: str, batch: RoundBatch) -> FunctionKey:
    """The target's forward depends on the width alone, and not on how the batch samples."""
    size = 0 if batch.is_eager else batch.padded_b  # nothing is captured for a batch of 0
    if phase == "verify":
        return phase, size, batch.shape.width, None
    return phase, size, batch.shape, batch.is_greedy
