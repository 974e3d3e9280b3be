"""The loss of a batch: one module for all kinds of heads, from packed documents to the loss and its metrics.

    L = sum_k decay^k  sum_t w[t, k] loss(t, k) / total_k

total_k is the sum of the weights of step k over all ranks and batches of one optimiser step. So the gradient does not
depend on how the documents were distributed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.data.store.features import Readout
from eagle_plugin.learning.train.batches import Batch, weigh_chains
from eagle_plugin.learning.train.loss import RowScores, StepRows, vocabulary_loss
from eagle_plugin.learning.train.methods import BatchPlan, Drafts, ObjectiveSettings, method_of
from eagle_plugin.learning.train.teacher import Teacher
from eagle_plugin.learning.train.unroll import lm_head_input

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
        self.method = method_of(head)
        if head.own_lm_head is not None:
            head.own_lm_head.requires_grad_(settings.train_lm_head)
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

    def plan(self, batch: Batch, seed: int) -> BatchPlan:
        """Weigh the rows of a batch and draw its random numbers; the same seed draws the same.

        Reads no parameter: call it on the module itself, not through a wrapper.
        """
        s = self.settings
        generator = torch.Generator().manual_seed(seed)
        weights = weigh_chains(batch, s.steps, s.prompt_weight)
        return self.method.plan(self.head, batch, weights, s, generator, self.training)._replace(seed=seed)

    def forward(self, batch: Batch, plan: BatchPlan, totals: Tensor, detail: bool = False) -> Losses:
        """Return the loss of the batch and its sums.

        totals [steps]: `plan.totals` summed over all that one optimiser step learns from. detail: measure alpha, which
        is always done in evaluation mode. There the target's probabilities are those of its whole vocabulary, with
        either teacher.
        """
        method, head = self.method, self.head
        loss, sums = method.learn(head, batch, plan, self.settings, partial(self._score, batch, plan, totals, detail))
        return Losses(method.reach_parameters(head, loss), sums)

    def _score(
        self, batch: Batch, plan: BatchPlan, totals: Tensor, detail: bool, drafts: Drafts
    ) -> tuple[Tensor, Tensor]:
        """The loss of some drafts, and their METRICS. The drafts of one row must be here with those of lower depth."""
        s, method, head = self.settings, self.method, self.head
        wanted = batch.document.new_zeros(len(batch), dtype=torch.bool)
        steps, anchors = drafts
        for k, anchor in enumerate(anchors):
            wanted[anchor + 1 + k] = True
        rows = wanted.nonzero()[:, 0]  # of the target: what follows token t+1+k
        place = wanted.cumsum(0) - 1
        scale = torch.tensor([s.decay**k for k in range(s.steps)], dtype=torch.float64, device=totals.device)
        scale = torch.where(totals > 0, scale / totals, 0.0).float()

        parts, weights = [], []
        for k, (state, anchor) in enumerate(zip(steps, anchors, strict=True)):
            weights.append(plan.weights[k, anchor])
            share = scale[k] * method.vocabulary_weight(s)
            parts.append(StepRows(lm_head_input(head, state), place[anchor + 1 + k], share * weights[k]))
        follow = batch.ids[(rows + 1).clamp(max=len(batch) - 1)]
        lm_head = self.teacher.draft.weight if head.own_lm_head is None else head.own_lm_head
        last = batch.last[rows]
        loss, scores = vocabulary_loss(
            self.teacher,
            last,
            follow,
            parts,
            lm_head,
            loss=s.loss,
            detail=detail or not self.training,
            columns=s.columns,
            seed=plan.seed,
            whole=not self.training,  # mass and alpha are those of the whole vocabulary
        )
        distances = []
        for k, (state, part) in enumerate(zip(steps, parts, strict=True)):
            distance = state.new_zeros(len(part.teacher), dtype=torch.float32)
            if method.regresses:
                wide = state.double() if state.dtype == torch.float64 else state.float()
                goal = last[part.teacher].to(wide.dtype)
                distance = F.smooth_l1_loss(wide, goal, reduction="none").mean(-1)
                loss = loss + s.regression * scale[k] * (weights[k] * distance).sum()
            distances.append(distance.detach())
        return loss, self._measure(batch, anchors, weights, scores, distances)

    def total_loss(self, metrics: dict[str, list[float]]) -> float:
        """The loss that is minimised, from the parts by depth that `summarize` returns."""
        s, parts = self.settings, metrics["loss"]
        if self.method.regresses:
            pairs = zip(parts, metrics["regression"], strict=True)
            parts = [s.classification * loss + s.regression * distance for loss, distance in pairs]
        return sum(s.decay**k * part for k, part in enumerate(parts) if not math.isnan(part))

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
    """sums [steps, len(METRICS)] -> means per step; nan where nothing was measured.

    "acceptance" is the share of drafts that are right where all earlier ones were; "accuracy" counts all rows, and the
    target's most probable token is the right one.
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
