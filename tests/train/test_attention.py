"""Flash attention merged with each row's own keys, against the equal dense form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_plugin.learning.train import attention
from eagle_plugin.learning.train.attention import Packing, attend

STARTS = torch.tensor([0, 7, 7, 8, 29])  # an empty document and one of a single row among them
ROWS, HEADS, SIZE, STEPS = 29, 6, 8, 3


def dense(
    q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, window: int | None
) -> Tensor:
    """One softmax over the rows of step 0 in the window and the row's own keys, by a mask of size [rows, rows]."""
    repeat = HEADS // k.shape[1]
    k, v, *own = (x.repeat_interleave(repeat, 1) for x in (k, v, *keys, *values))
    document = torch.bucketize(torch.arange(ROWS), STARTS, right=True)
    causal = (document[:, None] == document) & torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    if window is not None:  # the row is at its own position + the number of steps
        causal &= torch.arange(ROWS) > torch.arange(ROWS)[:, None] + len(keys) - window
    scores = torch.einsum("nhd,mhd->hnm", q, k).masked_fill(~causal, float("-inf"))
    beside = [torch.einsum("nhd,nhd->hn", q, key)[..., None] for key in own[: len(keys)]]
    weights = (torch.cat([scores, *beside], -1) * scale).softmax(-1)
    out = torch.einsum("hnm,mhd->nhd", weights[..., :ROWS], v)
    for i, value in enumerate(own[len(keys) :]):
        out = out + weights[..., ROWS + i].T[..., None] * value
    return out


def inputs(groups: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [HEADS] + [groups] * (2 + 2 * steps)
    return [
        torch.randn(ROWS, n, SIZE, generator=generator, dtype=torch.float64).mul(1.5).requires_grad_() for n in sizes
    ]


def both(groups: int, steps: int, window: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients: dense, and ours."""
    results = []
    for ours in (False, True):
        q, k, v, *own = tensors = inputs(groups, steps)
        keys, values = own[:steps], own[steps:]
        if ours:
            out = attend(Packing(STARTS, window), q, k, v, keys, values, 0.3)
        else:
            out = dense(q, k, v, keys, values, 0.3, window)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append([out, *torch.autograd.grad((out * cotangent).sum(), tensors)])
    return results[0], results[1]


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("steps", [0, 1, STEPS])
@pytest.mark.parametrize("window", [None, 4, 9, 100])
def test_output_and_gradients_are_those_of_one_softmax(
    groups: int, steps: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PART", 5)
    for expected, ours in zip(*both(groups, steps, window), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


def test_a_window_that_is_one_key_too_long_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: later steps see one key of step 0 less each."""
    monkeypatch.setattr(Packing, "before", lambda self, step: self.window - 1)
    expected, ours = both(2, STEPS, 6)
    assert (ours[0] - expected[0]).abs().max() > 1e-2


def test_gradients_without_the_joint_softmax_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the backward of step 0 alone, from its own output and log-sum-exp, is not the gradient."""
    backward = Packing.backward

    def alone(self: Packing, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> object:
        out, lse, rng = self.forward(q, k, v, 0.3)
        return backward(self, grad, q, k, v, out, lse, rng, 0.3)

    monkeypatch.setattr(attention.Packing, "backward", alone)
    expected, ours = both(2, STEPS)
    torch.testing.assert_close(ours[0], expected[0])
    assert (ours[1] - expected[1]).abs().max() > 1e-2
