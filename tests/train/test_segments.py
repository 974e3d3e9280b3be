"""Sequence partition: the loss, gradients and measures of the whole batch, in memory that does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_targets import dflash_head, peagle_head, random_documents, random_readout

from benchmarks.live_memory import LiveMemory
from eagle_plugin.learning.train.batches import Batch, weigh_chains
from eagle_plugin.learning.train.methods import ObjectiveSettings
from eagle_plugin.learning.train.objectives import Objective
from eagle_plugin.learning.train.parallel import MaskedRows, ParallelPass, sample_masked_rows
from eagle_plugin.learning.train.segments import cut_segments

DRAFT = torch.arange(0, 40, 2)
WHOLE = 1 << 40


HEADS: dict[str, Callable[..., Any]] = {
    "peagle": peagle_head,
    "dflash": partial(dflash_head, block=6),
    "causal dflash": partial(dflash_head, block=6, causal=True),
}


def make(layers: int = 2, kind: str = "peagle", **settings: Any) -> Objective:
    head = HEADS[kind](draft_ids=DRAFT, num_hidden_layers=layers)
    return Objective(head, random_readout(), ObjectiveSettings(**{"dtype": torch.float32, "decay": 1.0} | settings))


def step(objective: Objective, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, measures and the gradient of every parameter."""
    plan = objective.plan(batch, 0)
    losses = objective(batch, plan, plan.totals)
    learnt = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(losses.loss, list(learnt.values()), allow_unused=True)
    return losses.loss.detach(), losses.sums, {n: g for n, g in zip(learnt, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("limit", [1, 7, 40])
@pytest.mark.parametrize("train_lm_head", [True, False])
@pytest.mark.parametrize("kind", HEADS)
def test_segments_add_up_to_the_whole_batch(limit: int, train_lm_head: bool, kind: str) -> None:
    batch = random_documents([(4, 18), (2, 9), (3, 0), (1, 14)])
    whole, parts = (make(2, kind, steps=5, segment_rows=n, train_lm_head=train_lm_head) for n in (WHOLE, limit))
    masked = parts.plan(batch, 0).masked
    assert masked is not None and len(cut_segments(batch, masked, limit)) > 1
    one, many = step(whole, batch), step(parts, batch)
    torch.testing.assert_close(one[:2], many[:2], atol=1e-5, rtol=1e-5)
    assert one[2].keys() == many[2].keys() and ("head.lm_head.weight" in one[2]) == train_lm_head
    for name in one[2]:
        torch.testing.assert_close(one[2][name], many[2][name], atol=2e-5, rtol=1e-4, msg=name)


def test_what_the_segments_send_back_to_the_verified_rows_is_part_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: the same step whose masked rows see the verified rows as constants has another gradient."""
    batch, objective = random_documents([(4, 18)]), make(steps=5, segment_rows=7)
    right = step(objective, batch)[2]["head.fc.weight"]
    draft_masked = ParallelPass.draft_masked

    def cut_off(self: ParallelPass, rows: Any, first: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return draft_masked(self, rows, first, [key.detach() for key in keys], [value.detach() for value in values])

    monkeypatch.setattr(ParallelPass, "draft_masked", cut_off)
    assert (step(objective, batch)[2]["head.fc.weight"] - right).abs().max() > 1e-3


def test_segments_keep_chains_whole_and_cover_every_row_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        lengths = torch.randint(1, 12, (3, 2), generator=generator).tolist()
        batch = random_documents([(a, b) for a, b in lengths], seed=trial)
        rows = sample_masked_rows(batch, weigh_chains(batch, 5, 0.0), 0.7, 0.2, generator)
        limit = int(torch.randint(1, 30, (1,), generator=generator))
        segments = cut_segments(batch, rows, limit)
        assert [s.start for s in segments] == [0, *(s.end for s in segments[:-1])] and segments[-1].end == len(batch)
        assert sum(s.masked.stop - s.masked.start for s in segments) == len(rows.anchor)
        for segment in segments:
            anchors = rows.anchor[segment.masked]
            assert ((anchors >= segment.start) & (anchors < segment.end)).all()
            assert segment.context == batch.bounds[batch.document[segment.start]]
            assert len(anchors) <= limit or len(anchors.unique()) == 1


def test_no_masked_rows_are_one_segment() -> None:
    batch, none = random_documents([(3, 4)]), torch.empty(0, dtype=torch.int64)
    assert len(cut_segments(batch, MaskedRows(none, none), 8)) == 1


def peak(steps: int, segment_rows: int) -> int:
    """Bytes of the tensors of one forward and backward over 320 tokens."""
    objective, batch = make(1, steps=steps, segment_rows=segment_rows, keep_rate=1.0), random_documents([(20, 300)])
    plan = objective.plan(batch, 0)
    with LiveMemory() as memory:
        objective(batch, plan, plan.totals).loss.backward()
    return memory.peak


def test_memory_does_not_grow_with_the_depths() -> None:
    """Also without dropping any chain; in one piece the same batch needs several times the memory."""
    few, many, whole = peak(4, 64), peak(16, 64), peak(16, WHOLE)
    assert many < 1.1 * few
    assert whole > 3 * peak(4, WHOLE)
    assert whole > 3 * many
