"""Training-time test equals drafting from every row with the head's inference forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_targets import eagle2_head, eagle3_head, random_documents

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.eagle2 import Eagle2Head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.learning.train import unroll as module
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.unroll import unroll

STEPS, WINDOW = 4, 6
HEADS: dict[str, Callable[[], Any]] = {
    "eagle3-3.0": lambda: eagle3_head(),
    "eagle3-3.1": lambda: eagle3_head(fc_norm=True, norm_output=True),
    "eagle3-norm-before-fc": lambda: eagle3_head(norm_before_fc=True),
    "eagle3-norm-before-fc-and-output": lambda: eagle3_head(norm_before_fc=True, norm_output=True),
    "eagle3-both-norms-before-fc": lambda: eagle3_head(norm_before_fc=True, fc_norm=True),
    "eagle3-all-heads": lambda: eagle3_head(num_key_value_heads=4),
    "eagle3-llama3-rope": lambda: eagle3_head(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        max_position_embeddings=256,
    ),
    "eagle3-two-layers": lambda: eagle3_head(num_hidden_layers=2),
    "eagle3-window": lambda: eagle3_head(layer_types=["sliding_attention"], sliding_window=WINDOW),
    "eagle3-window-two-layers": lambda: eagle3_head(
        num_hidden_layers=2, layer_types=["sliding_attention"] * 2, sliding_window=WINDOW
    ),
    "eagle2": lambda: eagle2_head(),
    "eagle2-two-layers": lambda: eagle2_head(num_hidden_layers=2),
}


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_documents([(5, 9), (3, 8)])


@torch.no_grad()
def draft(head: DraftHead, ids: Tensor, features: Tensor, anchor: int) -> list[Tensor]:
    """Decode like an engine: the verified rows in one call, then one row per draft over a growing cache."""
    prefix, window = anchor + 1, head.window or len(ids)
    states, past = head(
        head.embed(ids[1 : prefix + 1]),
        head.fuse(features[:prefix]),
        torch.arange(prefix),
        torch.ones(prefix, prefix, dtype=torch.bool).tril().triu(1 - window),
    )
    drafted = [states[-1]]
    for k in range(1, STEPS):
        position = torch.tensor([anchor + k])
        token = ids[anchor + 1 + k : anchor + 2 + k]
        visible = torch.arange(prefix + k)[None] > anchor + k - window
        states, past = head(head.embed(token), drafted[-1][None], position, visible, past)
        drafted.append(states[0])
    return drafted


@torch.no_grad()
def largest_difference(head: Eagle2Head | Eagle3Head, batch: Batch) -> float:
    """Over all rows from which STEPS drafts fit into the document."""
    states = unroll(head, batch, STEPS, torch.float32)
    features = batch.last if head.spec.algorithm == "EAGLE" else batch.aux
    assert features is not None
    differences = []
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        for anchor in range(end - start - STEPS - 1):
            expected = draft(head, batch.ids[start:end], features[start:end], anchor)
            differences += [(state[start + anchor] - e).abs().max() for state, e in zip(states, expected, strict=True)]
    assert len(differences) > 10 * STEPS
    return torch.stack(differences).max().item()


@pytest.mark.parametrize("name", HEADS)
def test_equals_a_real_draft_from_every_row(name: str, batch: Batch) -> None:
    assert largest_difference(HEADS[name](), batch) < 2e-5


def test_the_window_counts(batch: Batch) -> None:
    """Control: the same head without its window drafts otherwise."""
    with_window = HEADS["eagle3-window"]()
    states = unroll(with_window, batch, STEPS, torch.float32)
    with_window.window = None
    assert (
        max((a - b).abs().max() for a, b in zip(states, unroll(with_window, batch, STEPS, torch.float32), strict=True))
        > 1e-2
    )


@pytest.mark.parametrize("name", ["eagle3-3.0", "eagle2"])
class TestControls:
    """Wrong ways to unroll, which the comparison must find."""

    def test_without_the_drafted_keys(self, name: str, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        attend = module.attend
        monkeypatch.setattr(
            module, "attend", lambda packing, q, k, v, keys, values, scale: attend(packing, q, k, v, [], [], scale)
        )
        assert largest_difference(HEADS[name](), batch) > 1e-2

    def test_positions_that_do_not_advance(self, name: str, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        at = module.RotaryTable.at
        monkeypatch.setattr(module.RotaryTable, "at", lambda self, positions: at(self, batch.positions))
        assert largest_difference(HEADS[name](), batch) > 1e-3

    def test_tokens_shifted_by_one(self, name: str, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        shift = module._shift
        monkeypatch.setattr(module, "_shift", lambda x, by: shift(x, by + 1))
        assert largest_difference(HEADS[name](), batch) > 1e-2

    def test_documents_that_see_each_other(self, name: str, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        packing = module.Packing
        monkeypatch.setattr(module, "Packing", lambda starts, window: packing(starts[[0, -1]], window))
        assert largest_difference(HEADS[name](), batch) > 1e-2


@pytest.mark.parametrize("name", ["eagle3-3.0", "eagle3-3.1", "eagle2"])
def test_gradients_equal_those_of_the_inference_forward(name: str, batch: Batch) -> None:
    """Step 0 of one document through both, with the same random cotangent."""
    head = HEADS[name]()
    one = Batch(batch.ids[:14], batch.mask[:14], batch.starts[:2], batch.aux[:14], batch.last[:14])  # type: ignore[index]
    cotangent = torch.randn(13, 16, generator=torch.Generator().manual_seed(0))
    parameters = {n: p for n, p in head.named_parameters() if p.requires_grad}

    def gradients(state: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad((state * cotangent).sum(), list(parameters.values()), allow_unused=True)

    features = one.last if name == "eagle2" else one.aux
    assert features is not None
    states, _ = head(
        head.embed(one.ids[1:]),
        head.fuse(features[:-1]),
        torch.arange(13),
        torch.ones(13, 13, dtype=torch.bool).tril(),
    )
    expected, ours = gradients(states), gradients(unroll(head, one, 1, torch.float32)[0][:-1])
    compared = 0
    for parameter, a, b in zip(parameters, expected, ours, strict=True):
        assert (a is None) == (b is None), parameter
        if a is not None and b is not None:
            torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4, msg=parameter)
            compared += 1
    assert compared >= 9
