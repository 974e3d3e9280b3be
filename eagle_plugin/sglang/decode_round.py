"""A decode round in four functions: draft, verify, walk, extend; replayed where they were captured, else run as is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.accepted_path import read_path
from eagle_plugin.policy.path_sums import PathSums, children_of
from eagle_plugin.runtime.graphs import Buckets, CapturedFunctions, Capturer, StaticMemory
from eagle_plugin.runtime.round import Drafts, HeadState, TopM, without_spare_places
from eagle_plugin.sglang.batch import BatchReader, RoundBatch
from eagle_plugin.sglang.deferred_extend import DeferredTokens
from eagle_plugin.sglang.drafter import DraftState, TreeDrafter
from eagle_plugin.sglang.logits import sanitize
from eagle_plugin.sglang.verifier import TargetOutput, TreeVerifier

STATE = ("state.logp", "state.tokens", "state.hidden", "state.roots")
ACCEPTED = ("accepted.index", "accepted.lengths", "accepted.tokens")


class DecodeRound:
    """The functions of a round of B lanes.

    What was captured reads and writes static memory: the batch (`BatchReader`), and what one function leaves for the
    next. A batch is padded to a captured size. Results lie in memory that the next round overwrites.
    """

    def __init__(self, drafter: TreeDrafter, verifier: TreeVerifier, reader: BatchReader) -> None:
        self._drafter, self._verifier, self._reader = drafter, verifier, reader
        self.deferred: DeferredTokens | None = None  # where the head reads the tokens of plain rounds later
        self.functions = CapturedFunctions()
        self.memory: StaticMemory | None = None
        self._buckets = Buckets([])
        self.shapes: tuple[Shape, ...] = ()  # that were captured
        self._path_sums: dict[tuple[Shape, int], PathSums] = {}  # by drafted shape and children: the graphs read them

    def sizes(self) -> list[int]:
        """The batch sizes that were captured, the largest first."""
        return list(self._buckets)

    def is_captured(self, batch: RoundBatch) -> bool:
        """Whether the results of this round lie in memory that the next round overwrites."""
        return len(batch.lanes) in self._buckets

    def lanes(self, b: int) -> int:
        """The lanes for a batch of b requests: the next captured size, or b where there is none."""
        return self._buckets.of(b) or b

    def draft(self, batch: RoundBatch, state: DraftState) -> Drafts:
        """Draft a tree per lane; state is what the round before left, of b requests."""
        if self._is_captured("draft", batch):
            for name, values in zip(STATE, _flat(state), strict=True):
                self._memory.put(name, values)
        return self._run("draft", batch, partial(self._draft, batch, state))

    def verify(self, batch: RoundBatch, drafts: Drafts) -> TargetOutput:
        """One forward of the target over the trees."""
        return self._run("verify", batch, partial(self._verifier.forward, batch, drafts.tree))

    def walk(self, batch: RoundBatch, drafts: Drafts, output: TargetOutput) -> Accepted:
        """Accept paths, for requests that ask for no more than temperature and filters."""
        return self._run("walk", batch, partial(self._walk, batch, drafts, output))

    def extend(self, batch: RoundBatch, accepted: Accepted, output: TargetOutput, state: DraftState) -> DraftState:
        """Move the accepted keys and values, and feed the accepted tokens to the head; accepted may have b requests.

        state is what the round began with: a plain round whose tokens the head reads later leaves it as it is. Returns
        what the next round begins with, of B requests.
        """
        if batch.shape == PLAIN and self.deferred is not None:
            return self._defer(self.deferred, batch, accepted, output, state)
        if not self._is_captured("extend", batch):
            accepted = without_spare_places(accepted)
        self._provide(accepted, batch)
        return self._run("extend", batch, partial(self._extend, batch, accepted, output))

    def path_sums(self, batch: RoundBatch, sums: PathSums, scores: Tensor) -> Tensor:
        """`sums` of the drafts of this round, whose scores these are: of b requests, or of B lanes. It comes last in a
        round, before another one drafts."""
        return self._run("sums", batch, lambda: sums(scores))

    def capture(
        self,
        capturer: Capturer,
        caps: Shape,
        shapes: Sequence[Shape],
        sizes: list[int],
        around: Callable[[Buckets, int], AbstractContextManager[Any]],
        with_sums: bool = False,
    ) -> None:
        """Capture the rounds of these shapes within `caps` for these batch sizes.

        around(buckets, size) is the context of the captures of one size; it may drop the size from the buckets.
        with_sums: capture path sums too, which a policy over these shapes reads.
        """
        buckets = Buckets(sizes)
        for size in list(buckets):
            with around(buckets, size):
                memory = self._static_memory(caps, size)
            if size in buckets:
                self.memory = memory
                break
        for size in list(buckets):
            with around(buckets, size):
                self._capture_size(capturer, shapes, size, with_sums)
        self._buckets, self.shapes = buckets, tuple(shapes)

    def _capture_size(self, capturer: Capturer, shapes: Sequence[Shape], size: int, with_sums: bool) -> None:
        """All functions of one batch size, those that come first in a round before the others (`CudaCapturer`)."""
        capture, memory = self.functions.capture, self._memory
        batches = [self._reader.padding(shape, size, greedy) for shape in shapes for greedy in (True, False)]

        def draft(batch: RoundBatch) -> Drafts:
            drafts = self._draft(batch, self._static_state(size))
            return drafts._replace(tree=memory.put_fields("tree", drafts.tree))

        def verify(batch: RoundBatch) -> TargetOutput:
            nodes = size * batch.shape.width
            tree = (memory.view(f"tree.{name}", size, batch.shape.width) for name in DraftTree._fields)
            logits = memory.view("logits", nodes, self._vocabulary)
            output = self._verifier.forward(batch, DraftTree(*tree), logits)
            if not memory.holds("logits", output.logits):
                logits.copy_(output.logits)
            return output._replace(logits=logits, features=memory.put("features", output.features))

        def walk(batch: RoundBatch, drafts: Drafts, output: TargetOutput) -> Accepted:
            return self._put_accepted(self._walk(batch, drafts, output))

        def provide_tree(batch: RoundBatch) -> None:
            """The calls before a capture compute: what they read must be a tree of this width."""
            roots = torch.zeros(size, dtype=torch.int64, device=batch.prefix_lens.device)
            memory.put_fields("tree", DraftTree.padding(roots, batch.shape.width))

        drafted = [capture(capturer, _key("draft", batch), partial(draft, batch)) for batch in batches]
        outputs: dict[int, TargetOutput] = {}  # by width: shapes of one width share it, greedy and sampled batches too
        for batch in batches:
            if batch.shape.width not in outputs:
                provide_tree(batch)
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
                sums = self._sums_of(batch.shape, drafts.scores, shapes)
                capture(capturer, _key("sums", batch), partial(sums, drafts.scores))

    def _sums_of(self, drafted: Shape, scores: Tensor, shapes: Sequence[Shape]) -> PathSums:
        key = drafted, children_of(drafted, scores)
        if key not in self._path_sums:
            self._path_sums[key] = PathSums(*key, shapes, scores.device)
        return self._path_sums[key]

    def padding_round(self, shape: Shape) -> tuple[DraftTree, TargetOutput, Accepted, DraftState]:
        """One lane of padding: what widths and dtypes the values of a round of this shape have."""
        batch = self._reader.padding(shape, 1, is_greedy=False)
        device, longest = batch.prefix_lens.device, shape.max_accept_length
        tree = DraftTree.padding(torch.zeros(1, dtype=torch.int64, device=device), shape.width)
        output = self._verifier.forward(batch, tree)
        index = torch.zeros(1, longest, dtype=torch.int32, device=device)
        accepted = Accepted(index, torch.ones_like(index[:, 0]), index.long())
        path = read_path(accepted, batch.prefix_lens, shape.width)
        state = self._drafter.extend(batch, accepted, path, output.features[:1].repeat(longest, 1))
        return tree, output, accepted, state

    def _static_memory(self, caps: Shape, lanes: int) -> StaticMemory:
        """Room for rounds up to `caps`."""
        tree, output, accepted, state = self.padding_round(caps)
        self._vocabulary, self._state_shapes = output.logits.shape[1], [x.shape[1:] for x in _flat(state)]
        memory = StaticMemory(tree.tokens.device)
        rows = [
            *zip((f"tree.{name}" for name in DraftTree._fields), tree, strict=True),
            *zip(STATE, _flat(state), strict=True),
            *zip(ACCEPTED, accepted, strict=True),
        ]
        for name, like in rows:
            memory.allocate(name, lanes * like.numel(), like.dtype)
        memory.allocate("logits", lanes * output.logits.numel(), output.logits.dtype)
        memory.allocate("features", lanes * output.features.numel(), output.features.dtype)
        return memory

    # The functions. Those above that are captured differ from these only in where their values lie.

    def _draft(self, batch: RoundBatch, state: DraftState) -> Drafts:
        return Drafts.plain(state.roots) if batch.shape == PLAIN else self._drafter.draft_tree(batch, state)

    def _walk(self, batch: RoundBatch, drafts: Drafts, output: TargetOutput) -> Accepted:
        sanitize(output.logits)
        return self._verifier.walk(batch, drafts, output.logits)

    def _extend(self, batch: RoundBatch, accepted: Accepted, output: TargetOutput) -> DraftState:
        self._verifier.commit(batch, accepted, output)
        path = read_path(accepted, batch.prefix_lens, batch.shape.width)
        return self._drafter.extend(batch, accepted, path, output.features[path.rows.view(-1)])

    def _defer(
        self, deferred: DeferredTokens, batch: RoundBatch, accepted: Accepted, output: TargetOutput, state: DraftState
    ) -> DraftState:
        deferred.rounds += 1
        self._provide(accepted, batch)
        self._run("extend", batch, partial(self._add_deferred, deferred, batch, accepted, output))
        return DraftState(state.head, accepted.tokens[:, 0])

    def _add_deferred(
        self, deferred: DeferredTokens, batch: RoundBatch, accepted: Accepted, output: TargetOutput
    ) -> None:
        self._verifier.commit_states(accepted, output)  # keys are where they belong: a plain round has one node
        deferred.add(batch, accepted, output.features)

    @property
    def _memory(self) -> StaticMemory:
        assert self.memory is not None
        return self.memory

    def _is_captured(self, phase: str, batch: RoundBatch) -> bool:
        return len(batch.lanes) in self._buckets and _key(phase, batch) in self.functions

    def _run(self, phase: str, batch: RoundBatch, function: Callable[[], Any]) -> Any:
        return self.functions.run(_key(phase, batch), function) if self._is_captured(phase, batch) else function()

    def _static_state(self, lanes: int) -> DraftState:
        views = [self._memory.view(name, lanes, *s) for name, s in zip(STATE, self._state_shapes, strict=True)]
        return DraftState(HeadState(TopM(views[0], views[1]), views[2]), views[3])

    def _provide(self, accepted: Accepted, batch: RoundBatch) -> None:
        """Put paths that did not come from the captured walk where the captured extend reads them."""
        if not self._is_captured("extend", batch) or self._memory.holds("accepted.tokens", accepted.tokens):
            return
        b, lanes = len(accepted.lengths), len(batch.lanes)
        self._put_accepted(accepted)
        for name, values in zip(ACCEPTED, accepted, strict=True):
            # What a round of another shape left is no path of this one.
            self._memory.view(name, lanes, *values.shape[1:])[b:] = 1 if name == "accepted.lengths" else 0

    def _put_accepted(self, accepted: Accepted) -> Accepted:
        return self._memory.put_fields("accepted", accepted)


def _key(phase: str, batch: RoundBatch) -> Hashable:
    """The target's forward depends on the width alone, and not on how the batch samples."""
    lanes, shape = len(batch.lanes), batch.shape
    return (phase, shape.width, lanes) if phase == "verify" else (phase, shape, lanes, batch.is_greedy)


def _flat(state: DraftState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return state.head.top.logp, state.head.top.tokens, state.head.hidden, state.roots
