"""Runs a decode step by its four functions, replayed where they were captured: verify, walk, extend, draft.

They serve steps in which every request verifies a tree of one captured shape (verify, walk, extend), and steps after
which trees of one captured shape are drafted for all requests (draft). What else a step does, and every other step,
runs without graphs of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.runtime.captured_rounds import FunctionKey, fits
from eagle_plugin.runtime.graph_memory import GraphMemory
from eagle_plugin.runtime.graphs import Capturer
from eagle_plugin.runtime.round import Drafts, HeadState
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.head_forwards import DraftBatch
from eagle_plugin.vllm.step_functions import StepFunctions
from eagle_plugin.vllm.step_memory import Root, StepMemory


class DecodeStep(StepFunctions):
    """What a runner asks of the captured functions.

    Drafted trees are overwritten after the step that verifies them.
    """

    # Of a plain step the target alone is captured.
    _step_size: int | None = None  # of the step's padded batch; None: no graphs for so many requests
    _verified: Shape | None = None  # of the trees that all requests of the step verify, if it was captured
    _case: bool | None = None  # of the target's forward (`TargetForward.case`)
    _batch: RoundBatch  # of the step
    _layers: Mapping[str, Any]  # the metadata of the target's forward, by layer

    # A step.

    def begin(self, batch: RoundBatch, layers: Mapping[str, Any], is_plain: bool = False) -> None:
        """Copy what the functions read of a step.

        layers: the metadata of the target's forward, by layer. is_plain: each request has one row, of text.
        """
        self._step_size = padded_b = self._buckets.of(batch.b)
        self._verified, self._batch, self._layers = None, batch, layers
        if padded_b is None:
            return
        self._memory.put_padded("prefix_lens", batch.prefix_lens, padded_b, 1)
        for layer in {group: layer for layer, group in self._tables.items()}.values():
            self._memory.put_table(layer, layers[layer].slot_table, batch.b, padded_b)
        self._linear.begin(self._memory, layers, padded_b)
        if batch.uniform and self._has_graphs(padded_b, batch.drafts.shape):
            self._verified = batch.drafts.shape
            if not self.holds(batch.drafts):
                self._memory.put_trees(batch.drafts.tree, padded_b)
        elif is_plain:
            self._verified = PLAIN
            self._memory.put_no_trees(padded_b, 1)
        if self._forward is not None:
            self._case = self._forward.case()

    def has_plain(self, size: int) -> bool:
        """Whether plain steps of a captured batch size have a function."""
        return self._forward is not None and ("verify", size, 1, self._forward.cases()[0]) in self.functions

    def padded_b(self, b: int, shape: Shape) -> int:
        """As of all captured rounds; of a plain step only where its forward is one of ours."""
        size = super().padded_b(b, shape)
        return size if shape != PLAIN or self.has_plain(size) else b

    def can_verify(self) -> bool:
        """Whether the target can run over the trees of this step by what was captured."""
        return self._verified is not None and self._can("verify", self._verified.width, self._case)

    def verify(self) -> Any:
        """Run the target over the trees of this step; what it returns, of the rows of the padded batch."""
        found = self._replay("verify", self._shape.width, self._case)
        self._linear.lend(self._layers, self._batch.b, self._shape.width)
        return found

    def can_walk(self, is_greedy: bool) -> bool:
        """Whether the trees of this step can be walked by what was captured."""
        return self._verified is not None and self._can("walk", self._verified, is_greedy)

    def walk(
        self, batch: RoundBatch, logits: Tensor, sampling: SamplingParams, rng_keys: Tensor | None
    ) -> tuple[Accepted, Tensor]:
        """Accept a path of each tree and move its keys and values; logits [b * W, V] are the target's.

        Returns the paths, and in memory of their own the tokens as vLLM takes them.
        """
        if not self._memory.holds("logits", logits):
            self._memory.put("logits", logits)
        self._memory.put_draws(sampling, rng_keys)
        self._linear.take(self._layers)
        accepted, tokens = self._replay("walk", self._shape, rng_keys is None)
        return Accepted(*(values[: batch.b] for values in accepted)), tokens[: batch.b].clone()

    def can_extend(self, accepted: Accepted, drafted: Shape, is_greedy: bool) -> bool:
        """Whether the head can read the accepted paths of this step by what was captured, to draft such trees."""
        shape = self._verified
        if shape is None or drafted == PLAIN or accepted.tokens.shape[1] != shape.max_accept_length:
            return False
        return self._can("extend", shape, is_greedy)

    def extend(self, accepted: Accepted, features: Sequence[Tensor], is_greedy: bool) -> Root:
        """Let the head read the accepted paths of b requests.

        features: the target's states of all nodes in parts [b * W, ...], which the head reads side by side.
        """
        memory, b, padded_b = self._memory, len(accepted.lengths), self._padded_b
        if not memory.holds("accepted.tokens", accepted.tokens):
            memory.put_accepted(accepted, padded_b)
        torch.cat(list(features), dim=-1, out=memory.features(padded_b, self._shape.width)[: len(features[0])])
        self._replay("extend", self._shape, is_greedy)
        return memory.root(b, is_greedy)

    def can_draft(self, batch: DraftBatch, state: HeadState) -> bool:
        """Whether these trees can be drafted by what was captured."""
        is_greedy = batch.rng_keys is None
        if batch.chains is not None or not self._can("draft", batch.shape, is_greedy):
            return False
        # Else there were too many rows to list all levels at once.
        return state.top.logp.shape[1:] == self._memory.list_shape(is_greedy)

    def draft_tree(self, batch: DraftBatch, roots: Tensor, state: HeadState) -> Drafts:
        """As `TreeProposer.draft_tree`; what `extend` left need not be copied."""
        memory, b = self._memory, len(roots)
        if not memory.holds("roots", roots):
            memory.put_root(Root(state, batch.lengths, roots), self._padded_b)
        if batch.rows is not None:
            memory.put_padded("lookup_rows", batch.rows, self._padded_b, 0)
        memory.put_draws(batch.sampling, batch.rng_keys)
        drafts: Drafts = self._replay("draft", batch.shape, batch.rng_keys is None)
        return drafts.first(b)

    def path_sums(self, drafted: Shape, is_greedy: bool, sums: PathSums, scores: Tensor) -> Tensor:
        """`sums` of the trees that were just drafted, whose scores these are: of b requests, or of the padded batch."""
        if self._step_size is None:
            return sums(scores)
        result: Tensor = self._run(("sums", self._step_size, drafted, is_greedy), partial(sums, scores))
        return result

    def holds(self, drafts: Drafts) -> bool:
        """Whether drafts lie in memory that later steps overwrite."""
        return bool(self.sizes()) and self._memory.holds("tree.tokens", drafts.tree.tokens)

    # Captures.

    def capture(
        self,
        capturer: Capturer,
        shapes: Sequence[Shape],
        sizes: list[int],
        graph_memory: GraphMemory,
        with_sums: bool = False,
    ) -> None:
        """Capture the functions of these shapes for these batch sizes, as far as one `fits` the other, in place of what
        was captured before.

        with_sums: capture path sums too, which a policy over `shapes` reads.
        """
        self._step_size, like = None, self._one_request()
        drafted = [shape for shape in shapes if shape != PLAIN]
        if not self._captures_plain:
            sizes = [size for size in sizes if any(fits(shape, size) for shape in drafted)]

        def allocate(most: int, rows: int) -> StepMemory:
            memory = StepMemory(self._caps, most, like, self._columns, self._tables, rows)
            self._linear.allocate(memory, most, rows)
            for i, one in enumerate(() if self._forward is None else self._forward.like):
                memory.allocate_rows(f"target.{i}", rows, one)
            return memory

        with nullcontext() if self._forward is None else self._forward.ready():
            self._capture_sizes(shapes, sizes, graph_memory, allocate, partial(self._capture_size, capturer, with_sums))

    def _capture_size(self, capturer: Capturer, with_sums: bool, padded_b: int) -> None:
        """All functions of one batch size, those whose results are read late before the others (`CudaCapturer`)."""

        def capture(phase: str, of: Shape | int, is_greedy: bool | None) -> Any:
            key = phase, padded_b, of, is_greedy
            return self.functions.capture(capturer, key, self._function(key))

        shapes = [shape for shape in self.shapes_at(padded_b) if shape != PLAIN]
        for width in sorted({shape.width for shape in shapes} | ({1} if self._captures_plain else set())):
            if self._forward is not None and padded_b * width <= len(self._forward.tokens):
                self._memory.put_no_trees(padded_b, width)
                for case in self._forward.cases():
                    with self._forward.prepared(padded_b * width, case):
                        capture("verify", width, case)
        for shape in shapes:
            for is_greedy in (True, False):
                scores = capture("draft", shape, is_greedy).scores
                if with_sums:
                    sums = partial(self._sums_of(shape, scores, self.shapes), scores)
                    self.functions.capture(capturer, ("sums", padded_b, shape, is_greedy), sums)
                capture("walk", shape, is_greedy)
                capture("extend", shape, is_greedy)

    # Parts of them.

    @property
    def _captures_plain(self) -> bool:
        """Whether plain steps have a function; linear layers keep their states otherwise than after trees."""
        return self._forward is not None and not len(self._linear)

    @property
    def _padded_b(self) -> int:
        assert self._step_size is not None
        return self._step_size

    @property
    def _shape(self) -> Shape:
        assert self._verified is not None
        return self._verified

    def _can(self, phase: str, of: Shape | int, is_greedy: bool | None) -> bool:
        return self._step_size is not None and (phase, self._step_size, of, is_greedy) in self.functions

    def _replay(self, phase: str, of: Shape | int, is_greedy: bool | None) -> Any:
        """Run a function that was captured for this step."""
        key: FunctionKey = phase, self._padded_b, of, is_greedy
        return self.functions.run(key, self._function(key))


def side_by_side(features: Sequence[Tensor]) -> Tensor:
    """The target's states as the head reads them, of parts [N, ...]."""
    return features[0] if len(features) == 1 else torch.cat(list(features), dim=-1)
