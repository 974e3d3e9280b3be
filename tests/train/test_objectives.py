"""The loss of a batch by its definition, row by row, for every kind of head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toy_targets import (
    block_states,
    dflash_head,
    eagle2_head,
    eagle3_head,
    parallel_states,
    peagle_head,
    random_documents,
    random_readout,
)

from eagle_plugin.heads.dflash import DFlashHead
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.learning.train.batches import Batch, pack
from eagle_plugin.learning.train.methods import ObjectiveSettings
from eagle_plugin.learning.train.objectives import METRICS, Objective, summarize
from eagle_plugin.learning.train.unroll import unroll

DRAFT = torch.arange(0, 40, 2)
SETTINGS = ObjectiveSettings(steps=3, dtype=torch.float32, noise=0.0, keep_rate=1.0, keep_floor=1.0)
LENGTHS = [(4, 8), (3, 6), (1, 7)]


def make(kind: str, **settings: Any) -> Objective:
    heads: dict[str, Any] = {
        "eagle2": eagle2_head,
        "eagle3": lambda: eagle3_head(draft_ids=DRAFT),
        "eagle3.1": lambda: eagle3_head(draft_ids=DRAFT, fc_norm=True, norm_output=True),
        "peagle": lambda: peagle_head(draft_ids=DRAFT, num_hidden_layers=2),
        "dflash": lambda: dflash_head(num_hidden_layers=2, block=4),  # with the target's lm_head
        "causal dflash": lambda: dflash_head(draft_ids=DRAFT, block=4, causal=True),
    }
    head = heads[kind]()
    readout = random_readout()
    if kind in ("eagle2", "dflash"):
        (head.lm_head if kind == "eagle2" else head.target_lm_head).copy_(readout.weight)
    return Objective(head, readout, replace(SETTINGS, **settings))


def states_of(head: DraftHead, objective: Objective, batch: Batch) -> list[dict[int, Tensor]]:
    """By step, the head's state of every row that drafts there."""
    steps = objective.settings.steps
    if isinstance(head, PEagleHead):
        masked = objective.plan(batch, 0).masked
        assert masked is not None
        states = parallel_states(head, batch, masked)
        return [{anchor: states[anchor, depth] for anchor, depth in states if depth == k} for k in range(steps)]
    if isinstance(head, DFlashHead):
        blocks = objective.plan(batch, 0).masked
        assert blocks is not None
        states = block_states(head, batch, blocks, steps)
        return [{anchor: states[anchor, depth] for anchor, depth in states if depth == k + 1} for k in range(steps)]
    unrolled = unroll(head, batch, steps, torch.float32)  # type: ignore[arg-type]
    return [dict(enumerate(states)) for states in unrolled]


def by_definition(objective: Objective, batch: Batch) -> tuple[Tensor, dict[str, list[float]]]:
    head, s = objective.head, objective.settings
    ids = torch.arange(len(head.d2t)) + head.d2t
    loss = torch.zeros(())
    means: dict[str, list[float]] = {name: [] for name in ("loss", "accuracy", "acceptance", "regression")}
    states = states_of(head, objective, batch)
    right: dict[int, bool] = {}
    for k in range(s.steps):
        values, hits, distances, tries, wins = [], [], [], 0, 0
        for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
            for t in range(start, end - 2 - k):
                if not batch.mask[t + 1 : t + 3 + k].all():
                    continue
                state = states[k][t]
                p = objective.readout(batch.last[t + 1 + k]).softmax(-1)
                log_q = head.logits(state).log_softmax(-1)
                values.append(-(p[ids] * log_q).sum())
                drafted = int(ids[log_q.argmax()])
                hits.append(drafted == int(p.argmax()))
                distances.append(F.smooth_l1_loss(state, batch.last[t + 1 + k]))
                if k == 0 or right[t]:
                    tries += 1
                    wins += drafted == int(batch.ids[t + 2 + k])
                right[t] = (k == 0 or right[t]) and drafted == int(batch.ids[t + 2 + k])
        mean, distance = torch.stack(values).mean(), torch.stack(distances).mean()
        eagle2 = isinstance(head, Eagle2Head)
        share = s.classification * mean + s.regression * distance if eagle2 else mean
        loss = loss + s.decay**k * share
        means["loss"].append(mean.item())
        means["accuracy"].append(sum(hits) / len(hits))
        means["acceptance"].append(wins / tries if tries else float("nan"))
        means["regression"].append(distance.item() if eagle2 else 0.0)
    return loss, means


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "eagle3.1", "peagle", "dflash", "causal dflash"])
def test_loss_gradient_and_measures_are_those_of_the_definition(kind: str) -> None:
    objective, batch = make(kind), random_documents(LENGTHS)
    # The data follows the head's own drafts half of the time, so that chains hold for some steps.
    with torch.no_grad():
        for _ in range(3):
            first = states_of(objective.head, objective, batch)[0]
            for t in filter(first.__contains__, range(0, len(batch) - 2, 2)):
                batch.ids[t + 2] = objective.head.to_target(objective.head.logits(first[t]).argmax())
    plan = objective.plan(batch, 0)
    ours = objective(batch, plan, plan.totals)
    loss, means = by_definition(objective, batch)
    torch.testing.assert_close(ours.loss, loss, atol=1e-4, rtol=1e-4)
    learnt = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    gradients = [torch.autograd.grad(x, list(learnt.values()), allow_unused=True) for x in (ours.loss, loss)]
    for name, a, b in zip(learnt, *gradients, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=name)
    summary = summarize(ours.sums)
    for measure, values in means.items():
        torch.testing.assert_close(summary[measure], values, atol=1e-4, rtol=1e-4, equal_nan=True, msg=measure)
    assert 0 < summary["acceptance"][0] < 1


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "peagle", "dflash"])
def test_the_spread_of_documents_over_batches_does_not_matter(kind: str) -> None:
    """Two unequal halves with common totals are one batch: in loss, gradient and sums."""
    objective, whole = make(kind), random_documents(LENGTHS)
    halves = [split(whole, 0, 1), split(whole, 1, 3)]
    learnt = [p for p in objective.parameters() if p.requires_grad]

    def run(batches: list[Batch]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        plans = [objective.plan(batch, 0) for batch in batches]
        totals = torch.stack([plan.totals for plan in plans]).sum(0)
        parts = [objective(batch, plan, totals) for batch, plan in zip(batches, plans, strict=True)]
        loss = torch.stack([part.loss for part in parts]).sum()
        return loss, torch.stack([part.sums for part in parts]).sum(0), list(
            torch.autograd.grad(loss, learnt, allow_unused=True)
        )  # fmt: skip

    one, two = run([whole]), run(halves)
    torch.testing.assert_close(one[:2], two[:2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        [x for x in one[2] if x is not None], [x for x in two[2] if x is not None], atol=1e-4, rtol=1e-4
    )
    alone = [objective(b, p, p.totals).loss for b, p in ((b, objective.plan(b, 0)) for b in halves)]
    assert abs(sum(alone).item() / 2 - one[0].item()) > 1e-3  # control: the mean of means is different


def split(batch: Batch, first: int, last: int) -> Batch:
    a, b = batch.bounds[first], batch.bounds[last]
    assert batch.aux is not None
    return Batch(batch.ids[a:b], batch.mask[a:b], batch.starts[first : last + 1] - a, batch.aux[a:b], batch.last[a:b])


@pytest.mark.parametrize("kind", ["eagle2", "peagle", "dflash"])
def test_a_seed_draws_the_same_and_evaluation_adds_no_noise(kind: str) -> None:
    objective, batch = make(kind, noise=0.2, keep_rate=0.5, keep_floor=0.1), random_documents(LENGTHS)

    def loss(seed: int) -> float:
        plan = objective.plan(batch, seed)
        with torch.no_grad():
            return objective(batch, plan, plan.totals).loss.item()

    assert loss(3) == loss(3) != loss(4)
    objective.eval()
    if kind == "eagle2":
        assert loss(3) == loss(4)
    objective.settings = replace(objective.settings, keep_rate=1.0)
    assert loss(3) == loss(4)


def test_noise_is_drawn_where_the_features_are(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, batch = make("eagle2", noise=0.2), random_documents(LENGTHS)
    drawn = objective.plan(batch, 3).noise
    expected = (torch.rand(batch.last.shape, generator=torch.Generator().manual_seed(3)) - 0.5) * 0.2
    assert drawn is not None
    torch.testing.assert_close(drawn, expected)
    # On another device by a generator of its own with the same seed; "meta" stands for a GPU.
    made: list[tuple[torch.device, torch.Generator]] = []
    drawing: list[tuple[torch.device, torch.Generator]] = []
    generator, rand = torch.Generator, torch.rand

    def make_generator(device: torch.device | str = "cpu") -> torch.Generator:
        made.append((torch.device(device), generator()))
        return made[-1][1]

    def draw(shape: torch.Size, *, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
        drawing.append((torch.device(device), generator))
        return rand(shape, generator=generator)

    monkeypatch.setattr(torch, "Generator", make_generator)
    monkeypatch.setattr(torch, "rand", draw)
    there = replace(batch, last=batch.last.to("meta"))
    again = objective.plan(there, 3).noise
    assert again is not None and again.equal(drawn)
    assert [device.type for device, _ in made] == ["cpu", "meta"] and drawing == [made[1]]


def test_bfloat16_is_near_float32() -> None:
    batch = random_documents(LENGTHS)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        objective = make("eagle3.1", dtype=dtype)
        plan = objective.plan(batch, 0)
        losses.append(objective(batch, plan, plan.totals).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize("kind", ["peagle", "dflash", "causal dflash"])
def test_a_batch_without_weights_costs_nothing_and_reaches_every_parameter(kind: str) -> None:
    objective, batch = make(kind), random_documents([(2, 0), (1, 1)])
    plan = objective.plan(batch, 0)
    losses = objective(batch, plan, plan.totals)
    losses.loss.backward()
    assert losses.loss.item() == 0 and losses.sums.sum() == 0
    assert not [name for name, p in objective.named_parameters() if p.requires_grad and p.grad is None]


def test_alpha_is_measured_on_request() -> None:
    objective, batch = make("eagle3"), random_documents(LENGTHS)
    plan = objective.plan(batch, 0)
    plain, detailed = (objective(batch, plan, plan.totals, detail=detail) for detail in (False, True))
    assert plain.sums[:, METRICS.index("alpha_weight")].sum() == 0
    assert torch.tensor(summarize(plain.sums)["alpha"]).isnan().all()
    alpha = torch.tensor(summarize(detailed.sums)["alpha"])
    assert (alpha > 0).all() and (alpha < 1).all()
    objective.eval()
    with torch.no_grad():
        assert summarize(objective(batch, plan, plan.totals).sums)["alpha"] == pytest.approx(alpha.tolist())


def test_new_settings_take_effect_from_the_next_batch() -> None:
    batch = random_documents(LENGTHS)
    used, fresh = make("eagle3"), make("eagle3", teacher="draft", steps=2)

    def loss(objective: Objective) -> float:
        plan = objective.plan(batch, 0)
        return objective(batch, plan, plan.totals).loss.item()

    before = loss(used)
    used.settings = fresh.settings
    assert loss(used) == loss(fresh) != before


def test_drop_wants_the_whole_vocabulary() -> None:
    with pytest.raises(ValueError, match="wanted teacher 'full'"):
        make("eagle3", oov="drop", teacher="draft")


def test_packing_wants_the_same_of_all_documents() -> None:
    batch = random_documents([(2, 3)])
    with pytest.raises(ValueError, match="wanted all or none"):
        pack([batch, replace(batch, aux=None)])
    with pytest.raises(ValueError, match="0 documents"):
        pack([])
