"""P-EAGLE's flat rows equal what the engine drafts, and rows are dropped without changing others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy_targets import peagle_head, random_documents

from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.train.batches import Batch, weigh_chains
from eagle_plugin.train.parallel import Slots, draft_parallel, sample_slots

DEPTHS = 4


@torch.no_grad()
def draft_as_engine(head: PEagleHead, ids: Tensor, aux: Tensor, anchor: int) -> Tensor:
    """The rows up to the anchor and the masked ones after it, with causal attention -> the last DEPTHS states."""
    verified, masked = anchor + 1, DEPTHS - 1
    tokens = torch.cat([ids[1 : verified + 1], ids.new_full((masked,), head.mask_token_id)])
    hidden = torch.cat([head.fuse(aux[:verified]), head.mask_state().expand(masked, -1)])
    rows = verified + masked
    visible = torch.ones(rows, rows, dtype=torch.bool).tril()
    states, _ = head(head.embed(tokens), hidden, torch.arange(rows), visible)
    return states[anchor:]


def all_slots(batch: Batch) -> Slots:
    weights = weigh_chains(batch, DEPTHS, 0.0)
    return sample_slots(batch, weights, 1.0, 1.0, torch.Generator())


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_output": True}], ids=["3.0", "3.1"])
def test_equals_the_engines_order(layers: int, norms: dict[str, bool]) -> None:
    head = peagle_head(num_hidden_layers=layers, **norms)
    batch = random_documents([(4, 7), (2, 9)])
    assert batch.aux is not None
    slots = all_slots(batch)
    states = draft_parallel(head, batch, slots, torch.float32)
    compared = 0
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        for anchor in range(start, end - DEPTHS):
            expected = draft_as_engine(head, batch.ids[start:end], batch.aux[start:end], anchor - start)
            for row in ((slots.anchor == anchor).nonzero()[:, 0]).tolist():
                torch.testing.assert_close(states[row], expected[slots.depth[row]], atol=2e-5, rtol=2e-5)
                compared += int(slots.depth[row] > 0)
    assert compared > 20


def test_dropping_the_ends_of_chains_changes_no_other_row_but_a_hole_does() -> None:
    head = peagle_head(num_hidden_layers=3)
    batch = random_documents([(2, 12)])
    slots = all_slots(batch)
    states = draft_parallel(head, batch, slots, torch.float32)

    def difference(kept: Tensor) -> float:
        few = draft_parallel(head, batch, Slots(slots.anchor[kept], slots.depth[kept]), torch.float32)
        return (few - states[kept]).abs().max().item()

    even = slots.anchor % 2 == 0
    assert difference((slots.depth == 0) | even) < 2e-5
    assert difference((slots.depth < 2) | even) < 2e-5
    assert difference(slots.depth != 1) > 1e-2


@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_chains_are_closed_and_stay_in_their_document(rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    deep = dropped = 0
    for trial in range(500):
        lengths = torch.randint(1, 12, (3, 2), generator=generator).tolist()
        batch = random_documents([(a, b) for a, b in lengths], seed=trial)
        batch.mask.copy_(torch.rand(len(batch), generator=generator) < 0.85)
        weights = weigh_chains(batch, DEPTHS, 0.0)
        slots = sample_slots(batch, weights, rate, 0.2, generator)
        kept = set(zip(slots.anchor.tolist(), slots.depth.tolist(), strict=True))
        assert len(kept) == len(slots.anchor)
        assert {(a, 0) for a in range(len(batch))} <= kept
        for anchor, depth in kept - {(a, 0) for a in range(len(batch))}:
            deep += 1
            assert (anchor, depth - 1) in kept
            assert batch.document[anchor] == batch.document[anchor + 2 + depth]
            assert batch.mask[anchor + 1 : anchor + 3 + depth].all()
        dropped += int((weights[1:] > 0).sum()) - len(kept) + len(batch)
    assert deep > 1000
    assert dropped > 500 if rate < 1 else dropped == 0
