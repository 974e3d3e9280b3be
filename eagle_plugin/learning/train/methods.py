"""How each kind of head learns: its drafts of a batch, and the terms of its loss beside that over the vocabulary.

`HeadSpec.objective` names the method of a kind; `METHODS` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.files import HeadError
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.blocks import BlockPass, sample_blocks
from eagle_plugin.learning.train.parallel import MaskedRows, ParallelPass, sample_masked_rows
from eagle_plugin.learning.train.segments import Segment, add_segments, cut_segments
from eagle_plugin.learning.train.unroll import unroll


@dataclass(frozen=True)
class ObjectiveSettings:
    """How a head learns. The defaults are for EAGLE-3 with its 3.1 norms."""

    steps: int = 4  # draft steps of training-time test; depths of P-EAGLE; levels of a block
    decay: float = 0.8  # the weight of step k is decay^k
    teacher: Literal["full", "draft"] = "full"
    oov: Literal["mass", "drop"] = "mass"
    top_k: int = 0
    columns: int = 0  # of lm_head that are learnt from a chunk of rows, see columns.py; 0: all
    loss: Literal["ce", "lk"] = "ce"
    prompt_weight: float = 0.0  # of rows that read or predict a prompt token
    train_lm_head: bool = True  # where the head has its own
    regression: float = 1.0  # EAGLE-2: weight of the distance to the target's next feature ...
    classification: float = 0.1  # ... and of the cross-entropy
    noise: float = 0.2  # EAGLE-2: width of the uniform noise on the features, times min(1, 512 / length)
    keep_rate: float = 0.7  # P-EAGLE: share of depth d that is drafted, to the power d; blocks: share of the anchors
    keep_floor: float = 0.2  # P-EAGLE: but at least this
    anchors: int = 512  # blocks: most anchors of a document; 0: no limit
    segment_rows: int = 2048  # P-EAGLE, blocks: most masked rows whose activations exist at once
    dtype: torch.dtype = torch.bfloat16  # of activations; parameters keep their own


class BatchPlan(NamedTuple):
    """What is random about one batch, and its weights."""

    weights: Tensor  # [steps, N] float32
    totals: Tensor  # [steps] float64, sums of the weights of the rows that are learnt from
    masked: MaskedRows | None  # ParallelDrafting and BlockDrafting only
    noise: Tensor | None  # [N, H], FeatureRegression only
    seed: int = 0  # of what is drawn while the loss is computed: the columns


Drafts = tuple[list[Tensor], list[Tensor]]  # by step: the states [rows, H], and the rows of the batch they start from
Score = Callable[[Drafts], tuple[Tensor, Tensor]]  # -> the loss of these drafts, and their measures without gradient


class TrainingTimeTest:
    """EAGLE-3 (arXiv 2503.01840, section 3.2): every draft step of every row, each reading the step before."""

    packs = True  # whether it attends by `attention.Packing`, whose kernel for GPUs has no float32
    regresses = False  # whether the distance to the target's next feature is part of the loss
    refused: frozenset[str] = frozenset()  # keys of a recipe's `loss` that a run of this method may not name

    def default_decay(self, depths: int) -> float:
        """The `decay` of a recipe that names none; depths: the most steps of any phase."""
        return 0.8

    def plan(
        self, head: Any, batch: Batch, weights: Tensor, s: ObjectiveSettings, generator: torch.Generator, training: bool
    ) -> BatchPlan:
        """Draw what is random about a batch with these weights [steps, N]."""
        return BatchPlan(weights, weights.sum(-1, dtype=torch.float64), None, None)

    def learn(
        self, head: Any, batch: Batch, plan: BatchPlan, s: ObjectiveSettings, score: Score
    ) -> tuple[Tensor, Tensor]:
        """Draft from the rows that count, and return what `score` says of the drafts."""
        # All steps share the target rows of step 0, so that none needs its own choice of them. The few additional rows
        # at the beginning of a document have weight 0.
        first = (plan.weights[0] > 0).nonzero()[:, 0]
        anchors = [first[first >= k] - k for k in range(s.steps)]
        steps = unroll(head, batch, s.steps, s.dtype, plan.noise)
        return score(([state.index_select(0, anchor) for state, anchor in zip(steps, anchors, strict=True)], anchors))

    def vocabulary_weight(self, s: ObjectiveSettings) -> float:
        """The weight of the loss over the vocabulary."""
        return 1.0

    def reach_parameters(self, head: Any, loss: Tensor) -> Tensor:
        """The same loss, with a gradient for parameters that this batch may not have used; DDP wants one for each."""
        return loss


class FeatureRegression(TrainingTimeTest):
    """EAGLE-2 (arXiv 2401.15077, section 3.2): cross-entropy and the distance to the target's next feature."""

    regresses = True

    def plan(
        self, head: Any, batch: Batch, weights: Tensor, s: ObjectiveSettings, generator: torch.Generator, training: bool
    ) -> BatchPlan:
        plan = super().plan(head, batch, weights, s, generator, training)
        if not training or not s.noise:
            return plan
        # As in the official training, but not wider in short documents, where 512 / length would hide the feature.
        width = s.noise * 512 / batch.starts.diff()[batch.document].clamp(min=512)
        device = batch.last.device
        if device.type != "cpu":  # a number for every feature: to draw them on the CPU and copy them would take long
            generator = torch.Generator(device).manual_seed(generator.initial_seed())
        uniform = torch.rand(batch.last.shape, generator=generator, device=device) - 0.5
        return plan._replace(noise=uniform * width[:, None])

    def vocabulary_weight(self, s: ObjectiveSettings) -> float:
        return s.classification


class ParallelDrafting(TrainingTimeTest):
    """P-EAGLE (arXiv 2602.01469): all depths in one pass over sampled masked rows, segment by segment."""

    def default_decay(self, depths: int) -> float:
        return 1.0

    def plan(
        self, head: Any, batch: Batch, weights: Tensor, s: ObjectiveSettings, generator: torch.Generator, training: bool
    ) -> BatchPlan:
        masked = sample_masked_rows(batch, weights, s.keep_rate, s.keep_floor, generator)
        totals = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        totals.index_add_(0, masked.depth, weights[masked.depth, masked.anchor].double())
        totals[0] = weights[0].sum(dtype=torch.float64)
        return BatchPlan(weights, totals, masked, None)

    def learn(
        self, head: Any, batch: Batch, plan: BatchPlan, s: ObjectiveSettings, score: Score
    ) -> tuple[Tensor, Tensor]:
        assert plan.masked is not None
        masked, work = plan.masked, ParallelPass(head, batch, s.steps, s.dtype)
        counts = plan.weights[0] > 0
        layers = len(work.layers)

        def draft(segment: Segment, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
            states, keys, values = rows[0], rows[1 : 1 + layers], rows[1 + layers :]
            first = counts[segment.start : segment.end].nonzero()[:, 0] + segment.start
            by_step, anchors = [states.index_select(0, first - segment.context)], [first]
            here = MaskedRows(masked.anchor[segment.masked], masked.depth[segment.masked])
            deep = work.draft_masked(here, segment.context, keys, values) if len(here.anchor) else states[:0]
            for depth in range(1, s.steps):
                picked = (here.depth == depth).nonzero()[:, 0]
                by_step.append(deep.index_select(0, picked))
                anchors.append(here.anchor[picked])
            return score((by_step, anchors))

        weights = work.weights() + ([] if head.own_lm_head is None else [head.own_lm_head])
        segments = cut_segments(batch, masked, s.segment_rows)
        return add_segments(draft, segments, [work.states, *work.keys, *work.values], weights)

    def reach_parameters(self, head: Any, loss: Tensor) -> Tensor:
        return loss + 0.0 * head.mask_hidden.sum()  # a batch without masked rows does not use it


class BlockDrafting(TrainingTimeTest):
    """DFlash (arXiv 2602.06036): whole blocks after sampled rows, segment by segment.

    The first drafts of a block count most, because the later ones are only used where these are right: decay^k.
    """

    packs = False
    refused = frozenset({"keep_floor", "regression", "classification", "noise"})

    def default_decay(self, depths: int) -> float:
        # exp(-1 / gamma) as in the paper's equation 4, with gamma 4 for a block of 8 rows and 7 for one of 16.
        return math.exp(-1 / (4 + (depths + 1 - 8) * 3 / 8))

    def plan(
        self, head: Any, batch: Batch, weights: Tensor, s: ObjectiveSettings, generator: torch.Generator, training: bool
    ) -> BatchPlan:
        blocks = sample_blocks(batch, weights, s.keep_rate, s.anchors, head.causal, generator)
        anchors = blocks.anchor[blocks.depth == 0]
        return BatchPlan(weights, weights[:, anchors].sum(-1, dtype=torch.float64), blocks, None)

    def learn(
        self, head: Any, batch: Batch, plan: BatchPlan, s: ObjectiveSettings, score: Score
    ) -> tuple[Tensor, Tensor]:
        assert plan.masked is not None
        blocks, work = plan.masked, BlockPass(head, batch, s.steps, s.dtype)
        layers = len(work.layers)

        def draft(segment: Segment, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
            here = MaskedRows(blocks.anchor[segment.masked], blocks.depth[segment.masked])
            states = work.draft(here, segment.context, rows[:layers], rows[layers:])
            by_step, anchors = [], []
            for k in range(s.steps):
                picked = ((here.depth == k + 1) & (plan.weights[k, here.anchor] > 0)).nonzero()[:, 0]
                by_step.append(states.index_select(0, picked))
                anchors.append(here.anchor[picked])
            return score((by_step, anchors))

        weights = work.weights() + ([] if head.own_lm_head is None else [head.own_lm_head])
        return add_segments(draft, cut_segments(batch, blocks, s.segment_rows), [*work.keys, *work.values], weights)


METHODS = {
    "training_time_test": TrainingTimeTest(),
    "feature_regression": FeatureRegression(),
    "parallel": ParallelDrafting(),
    "blocks": BlockDrafting(),
}


def method_of(head: DraftHead) -> TrainingTimeTest:
    """How a head learns. Raises HeadError where heads of its kind are not trained."""
    if head.spec.objective is None:
        raise HeadError(f"a head of kind {head.kind} is not trained here yet; name another kind, or another head")
    return METHODS[head.spec.objective]
