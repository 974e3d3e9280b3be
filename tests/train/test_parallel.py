"""P-EAGLE's masked rows equal what the engine drafts, and rows are dropped without changing others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toy_targets import parallel_states, peagle_head, random_documents

from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.learning.train.batches import Batch, weigh_chains
from eagle_plugin.learning.train.parallel import MaskedRows, attend_visible, repeat_heads, sample_masked_rows

DEPTHS = 4


@torch.no_grad()
def draft_as_engine(head: PEagleHead, ids: Tensor, aux: Tensor, anchor: int) -> Tensor:
    """The rows up to the anchor and the masked ones after it, with causal attention -> the last DEPTHS states."""
    verified, masked = anchor + 1, DEPTHS - 1
    tokens = torch.cat([ids[1 : verified + 1], ids.new_full((masked,), head.mask_token_id)])
    hidden = torch.cat([head.fuse(aux[:verified]), head.mask_state().expand(masked, -1)])
    rows = verified + masked
    visible = torch.ones(rows, rows, dtype=torch.bool).tril().triu(1 - (head.window or rows))
    states, _ = head(head.embed(tokens), hidden, torch.arange(rows), visible)
    return states[anchor:]


def all_rows(batch: Batch) -> MaskedRows:
    weights = weigh_chains(batch, DEPTHS, 0.0)
    return sample_masked_rows(batch, weights, 1.0, 1.0, torch.Generator())


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_output": True}], ids=["3.0", "3.1"])
@pytest.mark.parametrize("window", [None, 5])
def test_equals_the_engines_order(layers: int, norms: dict[str, bool], window: int | None) -> None:
    head = peagle_head(num_hidden_layers=layers, **norms)
    head.window = window
    batch = random_documents([(4, 7), (2, 9)])
    assert batch.aux is not None
    states = parallel_states(head, batch, all_rows(batch))
    compared = 0
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        for anchor in range(start, end - DEPTHS):
            expected = draft_as_engine(head, batch.ids[start:end], batch.aux[start:end], anchor - start)
            for depth in range(DEPTHS):
                if (anchor, depth) in states:
                    torch.testing.assert_close(states[anchor, depth], expected[depth], atol=2e-5, rtol=2e-5)
                    compared += depth > 0
    assert compared > 20


def test_dropping_the_ends_of_chains_changes_no_other_row_but_a_hole_does() -> None:
    head = peagle_head(num_hidden_layers=3)
    batch = random_documents([(2, 12)])
    rows = all_rows(batch)
    states = parallel_states(head, batch, rows)

    def difference(kept: Tensor) -> float:
        few = parallel_states(head, batch, MaskedRows(rows.anchor[kept], rows.depth[kept]))
        return max((state - states[place]).abs().max().item() for place, state in few.items())

    even = rows.anchor % 2 == 0
    assert difference(even) < 2e-5
    assert difference((rows.depth < 2) | even) < 2e-5
    assert difference(rows.depth != 1) > 1e-2


def test_a_gpu_gets_a_key_for_each_query_head(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, n, 8, generator=generator) for heads, n in ((6, 5), (2, 9), (2, 9)))
    visible = torch.rand(5, 9, generator=generator) < 0.6
    visible[:, 0] = True
    expected = attend_visible(query, key, value, visible)
    wide = [repeat_heads(part, 6) for part in (key, value)]
    torch.testing.assert_close(F.scaled_dot_product_attention(query, *wide, visible), expected)
    wrong = [part.repeat(1, 3, 1, 1) for part in (key, value)]  # control: heads in another order
    assert (F.scaled_dot_product_attention(query, *wrong, visible) - expected).abs().max() > 0.1

    def note(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, **more: bool) -> Tensor:
        assert key.shape == value.shape == (1, 6, 9, 8) and not more
        return torch.empty_like(query)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    there = [part.to("meta") for part in (query, key, value, visible)]  # "meta" stands for a GPU
    assert attend_visible(*there).shape == query.shape


@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_chains_are_closed_and_stay_in_their_document(rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    deep = dropped = 0
    for trial in range(500):
        lengths = torch.randint(1, 12, (3, 2), generator=generator).tolist()
        batch = random_documents([(a, b) for a, b in lengths], seed=trial)
        batch.mask.copy_(torch.rand(len(batch), generator=generator) < 0.85)
        weights = weigh_chains(batch, DEPTHS, 0.0)
        rows = sample_masked_rows(batch, weights, rate, 0.2, generator)
        kept = list(zip(rows.anchor.tolist(), rows.depth.tolist(), strict=True))
        assert kept == sorted(set(kept)) and all(depth > 0 for _, depth in kept)
        for anchor, depth in kept:
            deep += 1
            assert depth == 1 or (anchor, depth - 1) in kept
            assert batch.document[anchor] == batch.document[anchor + 2 + depth]
            assert batch.mask[anchor + 1 : anchor + 3 + depth].all()
        dropped += int((weights[1:] > 0).sum()) - len(kept)
    assert deep > 1000
    assert dropped > 500 if rate < 1 else dropped == 0
