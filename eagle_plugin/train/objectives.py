"""What a batch costs: one module over all head kinds, from packed documents to the loss and its measures.

    L = sum_k decay^k  sum_t w[t, k] loss(t, k) / total_k

total_k is the sum of the weights of step k over everything that one optimiser step learns from: all ranks and all
batches. So the gradient does not depend on how the documents were spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_plugin.data.store.features import Readout
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.layers import DraftHead
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.train.batches import Batch, weigh_chains
from eagle_plugin.train.loss import RowScores, StepRows, Teacher, vocabulary_loss
from eagle_plugin.train.parallel import Slots, draft_parallel, sample_slots
from eagle_plugin.train.unroll import finish, unroll

METRICS = (
    "weight",
    "loss",
    "hits",
    "mass",
    "chain_tries",
    "chain_hits",
    "alpha",
    "alpha_weight",
    "regression",
)


@dataclass(frozen=True)
class ObjectiveSettings:
    """How a head learns. The defaults are for EAGLE-3 with its 3.1 norms."""

    steps: int = 4  # draft steps of training-time test; depths of P-EAGLE
    decay: float = 0.8  # step k weighs decay^k
    teacher: Literal["full", "draft"] = "full"
    oov: Literal["mass", "drop"] = "mass"
    top_k: int = 0
    loss: Literal["ce", "lk"] = "ce"
    prompt_weight: float = 0.0  # of rows that consume or predict a prompt token
    train_lm_head: bool = True  # EAGLE-2's is the target's and never learns
    regression: float = 1.0  # EAGLE-2: weight of the distance to the target's next feature ...
    classification: float = 0.1  # ... and of the cross-entropy
    noise: float = 0.2  # EAGLE-2: uniform noise on the features, this times min(1, 512 / length) wide
    keep_rate: float = 0.7  # P-EAGLE: share of depth d that is drafted, to the power d ...
    keep_floor: float = 0.2  # ... but at least this
    dtype: torch.dtype = torch.bfloat16  # of activations; parameters keep their own


class Plan(NamedTuple):
    """What is random about one batch, and its weights."""

    weights: Tensor  # [steps, N] float32
    totals: Tensor  # [steps] float64, sums of the weights of the rows that are learnt from
    slots: Slots | None
    noise: Tensor | None  # [N, H]


class Losses(NamedTuple):
    """A tuple of tensors, so that the hooks of DDP and FSDP find them."""

    loss: Tensor  # scalar: this batch's share of the loss
    sums: Tensor  # [steps, len(METRICS)] float64, without gradient; they add up over batches and ranks


class Objective(nn.Module):
    """The loss of a draft head on a batch. All steps run inside one forward, as FSDP wants it."""

    def __init__(self, head: DraftHead, readout: Readout, settings: ObjectiveSettings) -> None:
        """readout: of the target; the head's parameters are those of the module, and only they move with `.to`."""
        super().__init__()
        if settings.oov == "drop" and settings.teacher != "full":
            raise ValueError("oov 'drop' with teacher 'draft'; wanted teacher 'full', which knows what is outside")
        self.head = head
        self.settings = settings
        self.readout = readout
        if isinstance(head, Eagle3Head):
            head.lm_head.requires_grad_(settings.train_lm_head)
        self._teacher: tuple[tuple[object, ...], Teacher] | None = None

    @property
    def teacher(self) -> Teacher:
        """The target's distribution under the present settings, on the head's device; made on first use."""
        s, device = self.settings, self.head.d2t.device
        wanted = (s.teacher, s.oov, s.top_k, s.dtype, device)
        if self._teacher is None or self._teacher[0] != wanted:
            bias = self.readout.bias
            here = replace(
                self.readout, weight=self.readout.weight.to(device), bias=None if bias is None else bias.to(device)
            )
            ids = self.head.d2t + torch.arange(len(self.head.d2t), device=device)
            self._teacher = wanted, Teacher(here, ids, s.dtype, mode=s.teacher, oov=s.oov, top_k=s.top_k)
        return self._teacher[1]

    def plan(self, batch: Batch, seed: int) -> Plan:
        """Weigh the rows of a batch and draw its random numbers; the same seed draws the same.

        Touches no parameter: call it on the module itself, not through a wrapper.
        """
        s = self.settings
        generator = torch.Generator().manual_seed(seed)
        weights = weigh_chains(batch, s.steps, s.prompt_weight)
        slots = noise = None
        totals = weights.sum(-1, dtype=torch.float64)
        if isinstance(self.head, PEagleHead):
            slots = sample_slots(batch, weights, s.keep_rate, s.keep_floor, generator)
            picked = weights[slots.depth, slots.anchor].double()
            totals = torch.zeros_like(totals).index_add_(0, slots.depth, picked)
        elif isinstance(self.head, Eagle2Head) and self.training and s.noise:
            # As in the official training, but no wider in short documents, where 512 / length would drown the feature.
            width = s.noise * 512 / batch.starts.diff()[batch.document].clamp(min=512)
            uniform = torch.rand(batch.last.shape, generator=generator) - 0.5
            noise = uniform.to(batch.last.device) * width[:, None]
        return Plan(weights, totals, slots, noise)

    def forward(self, batch: Batch, plan: Plan, totals: Tensor, detail: bool = False) -> Losses:
        """Return the loss of the batch and its sums.

        totals [steps]: `plan.totals` summed over all that one optimiser step learns from. detail: measure alpha, which
        is always done in evaluation mode.
        """
        s = self.settings
        wanted = batch.document.new_zeros(len(batch), dtype=torch.bool)
        steps, anchors = self._draft(batch, plan)
        for k, anchor in enumerate(anchors):
            wanted[anchor + 1 + k] = True
        rows = wanted.nonzero()[:, 0]  # of the target: what follows token t+1+k
        place = wanted.cumsum(0) - 1
        scale = torch.tensor([s.decay**k for k in range(s.steps)], dtype=torch.float64, device=totals.device)
        scale = torch.where(totals > 0, scale / totals, 0.0).float()

        head = self.head
        final = isinstance(head, Eagle3Head) and not head.norm_output
        parts, weights = [], []
        for k, (state, anchor) in enumerate(zip(steps, anchors, strict=True)):
            weights.append(plan.weights[k, anchor])
            share = scale[k] * (s.classification if isinstance(head, Eagle2Head) else 1.0)
            inputs = finish(head, state) if final and isinstance(head, Eagle3Head) else state
            parts.append(StepRows(inputs, place[anchor + 1 + k], share * weights[k]))
        follow = batch.ids[(rows + 1).clamp(max=len(batch) - 1)]
        lm_head = head.lm_head.weight if isinstance(head, Eagle3Head) else self.teacher.draft.weight
        last = batch.last[rows]
        loss, scores = vocabulary_loss(
            self.teacher, last, follow, parts, lm_head, loss=s.loss, detail=detail or not self.training
        )
        distances = []
        for k, (state, part) in enumerate(zip(steps, parts, strict=True)):
            distance = state.new_zeros(len(part.teacher), dtype=torch.float32)
            if isinstance(head, Eagle2Head):
                wide = state.double() if state.dtype == torch.float64 else state.float()
                goal = last[part.teacher].to(wide.dtype)
                distance = F.smooth_l1_loss(wide, goal, reduction="none").mean(-1)
                loss = loss + s.regression * scale[k] * (weights[k] * distance).sum()
            distances.append(distance.detach())
        if isinstance(head, PEagleHead):
            loss = loss + 0.0 * head.mask_hidden.sum()  # no deep slot in this batch: a gradient all the same
        return Losses(loss, self._measure(batch, anchors, weights, scores, distances))

    def _draft(self, batch: Batch, plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
        """The states of the rows that count, and which rows of the batch they start from, a step."""
        s, head = self.settings, self.head
        if isinstance(head, PEagleHead):
            assert plan.slots is not None
            anchor, depth = plan.slots
            counts = plan.weights[depth, anchor] > 0
            picks = [((depth == k) & counts).nonzero()[:, 0] for k in range(s.steps)]
            states = draft_parallel(head, batch, plan.slots, s.dtype)
            return [states.index_select(0, pick) for pick in picks], [anchor[pick] for pick in picks]
        assert isinstance(head, Eagle2Head | Eagle3Head)
        # All steps share the target rows of step 0, so that none needs its own choice of them. The few rows more at
        # the beginning of a document weigh nothing.
        first = (plan.weights[0] > 0).nonzero()[:, 0]
        anchors = [first[first >= k] - k for k in range(s.steps)]
        steps = unroll(head, batch, s.steps, s.dtype, plan.noise)
        return [state.index_select(0, anchor) for state, anchor in zip(steps, anchors, strict=True)], anchors

    @torch.no_grad()
    def _measure(
        self,
        batch: Batch,
        anchors: list[Tensor],
        weights: list[Tensor],
        scores: list[RowScores],
        distances: list[Tensor],
    ) -> Tensor:
        """The sums of METRICS. A chain is tried at depth k where its drafts 0..k-1 were the tokens of the data."""
        alive = torch.ones(len(batch), dtype=torch.bool, device=batch.ids.device)
        sums = []
        for k, (anchor, weight, score) in enumerate(zip(anchors, weights, scores, strict=True)):
            right = score.choice + self.head.d2t[score.choice] == batch.ids[anchor + 2 + k]
            tried = alive[anchor]
            alive = torch.zeros_like(alive).index_put_((anchor,), tried & right)
            measured = ~score.alpha.isnan()
            values = {
                "weight": weight,
                "loss": weight * score.loss,
                "hits": weight * score.hit,
                "mass": weight * score.mass,
                "chain_tries": weight * tried,
                "chain_hits": weight * (tried & right),
                "alpha": weight * score.alpha.nan_to_num(),
                "alpha_weight": weight * measured,
                "regression": weight * distances[k],
            }
            sums.append(torch.stack([values[name].sum(dtype=torch.float64) for name in METRICS]))
        return torch.stack(sums)


def summarize(sums: Tensor) -> dict[str, list[float]]:
    """sums [steps, len(METRICS)] -> means a step; nan where nothing was measured.

    "acceptance" is the share of drafts that are right where all earlier ones were; "accuracy" counts all rows and takes
    the target's most probable token for right.
    """
    column = {name: sums[:, i] for i, name in enumerate(METRICS)}
    ratios = {
        "loss": ("loss", "weight"),
        "accuracy": ("hits", "weight"),
        "acceptance": ("chain_hits", "chain_tries"),
        "alpha": ("alpha", "alpha_weight"),
        "mass": ("mass", "weight"),
        "regression": ("regression", "weight"),
    }
    return {name: (column[over] / column[under]).tolist() for name, (over, under) in ratios.items()}
