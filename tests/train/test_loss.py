"""The chunked loss against autograd over whole tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_targets import random_documents, random_readout

from eagle_plugin.learning.train.batches import weigh_chains
from eagle_plugin.learning.train.loss import LK_RATE, StepRows, vocabulary_loss
from eagle_plugin.learning.train.teacher import Teacher

ROWS, HIDDEN, VOCAB = 37, 16, 40
DRAFT = torch.tensor([0, 1, 3, 4, 7, 8, 12, 20, 21, 22, 30, 39])


def case(seed: int = 0) -> tuple[Tensor, Tensor, list[StepRows], Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = normal(len(DRAFT), HIDDEN).requires_grad_()
    last, tokens = normal(ROWS, HIDDEN), torch.randint(0, VOCAB, (ROWS,), generator=generator)
    steps = []
    for count in (ROWS, 20, 0, 5):  # all rows, some, none, few
        rows = torch.randperm(ROWS, generator=generator)[:count].sort().values
        factor = torch.rand(count, generator=generator, dtype=torch.float64)
        steps.append(StepRows(normal(count, HIDDEN).requires_grad_(), rows, factor))
    return last, tokens, steps, weight


def reference(
    last: Tensor, tokens: Tensor, steps: list[StepRows], weight: Tensor, **options: Any
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The same by its definition, everything at once."""
    logits = readout()(last)
    full = logits.softmax(-1)
    p = full[:, DRAFT]
    best = logits.argmax(-1)
    if options.get("mode") == "draft":
        p = p / p.sum(-1, keepdim=True)
        best = torch.where(torch.isin(tokens, DRAFT), DRAFT[logits[:, DRAFT].argmax(-1)], -1)
    if options.get("oov") == "drop":
        p = p / p.sum(-1, keepdim=True) * torch.isin(best, DRAFT)[:, None]
    if options.get("top_k"):
        p = p * (p >= p.topk(options["top_k"]).values[:, -1:])
    value, scores = torch.zeros((), dtype=torch.float64), []
    for step in steps:
        here, q = p[step.teacher], F.softmax(step.inputs @ weight.T, -1)
        losses = -(here * q.log()).sum(-1)
        alpha = torch.minimum(here, q).sum(-1)
        if options.get("loss") == "lk":
            share = (-LK_RATE * alpha.detach()).exp()
            losses = share * losses + (1 - share) * (1 - alpha)
        value = value + (step.factor * losses).sum()
        choice = q.argmax(-1)
        hit = (DRAFT[choice] == best[step.teacher]).double()
        scores.append({"loss": losses, "alpha": alpha, "mass": here.sum(-1), "choice": choice, "hit": hit})
    return value, scores


def readout() -> Any:
    plain = random_readout(0, HIDDEN, VOCAB)
    return replace(plain, weight=plain.weight.double(), factor=0.5, softcap=5.0)


OPTIONS = [
    {},
    {"mode": "draft"},
    {"oov": "drop"},
    {"top_k": 3},
    {"loss": "lk"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tile", [4, 64])
def test_loss_gradients_and_scores_equal_autograd(options: dict[str, Any], tile: int) -> None:
    last, tokens, steps, weight = case()
    expected, wanted = reference(last, tokens, steps, weight, **options)
    loss = options.get("loss", "ce")
    teacher = Teacher(readout(), DRAFT, torch.float64, **{k: v for k, v in options.items() if k != "loss"})
    value, scores = vocabulary_loss(teacher, last, tokens, steps, weight, loss=loss, detail=True, tile=tile)
    torch.testing.assert_close(value, expected)
    learnt = [weight, *(step.inputs for step in steps)]
    ours, theirs = (torch.autograd.grad(3 * x, learnt) for x in (value, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    for score, want in zip(scores, wanted, strict=True):
        for name, values in want.items():
            torch.testing.assert_close(getattr(score, name), values.detach(), msg=name)


@pytest.mark.parametrize("tile", [4, 64])
def test_mode_draft_can_be_measured_over_the_whole_vocabulary(tile: int) -> None:
    last, tokens, steps, weight = case()
    full, draft = (Teacher(readout(), DRAFT, torch.float64, mode=mode) for mode in ("full", "draft"))
    wanted, scores = vocabulary_loss(full, last, tokens, steps, weight, detail=True, tile=tile)
    value, ours = vocabulary_loss(draft, last, tokens, steps, weight, detail=True, tile=tile, whole=True)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(ours, scores)


def test_without_a_draft_vocabulary_and_with_a_frozen_matrix() -> None:
    last, tokens, steps, _ = case()
    whole = readout().weight
    teacher = Teacher(replace(readout(), softcap=None, factor=1.0), None, torch.float64)
    value, scores = vocabulary_loss(teacher, last, tokens, steps[:1], whole)
    p, z = (last @ whole.T).softmax(-1), steps[0].inputs @ whole.T
    expected = -(steps[0].factor * (p[steps[0].teacher] * z.log_softmax(-1)).sum(-1)).sum()
    torch.testing.assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(x, steps[0].inputs)[0] for x in (value, expected))
    torch.testing.assert_close(ours, theirs)
    assert torch.allclose(scores[0].mass, torch.ones(ROWS, dtype=torch.float64))
    assert scores[0].alpha.isnan().all()  # `detail` is not set


def test_bfloat16_is_near() -> None:
    last, tokens, steps, weight = case()
    expected, _ = reference(last, tokens, steps, weight)
    low = [s._replace(inputs=s.inputs.detach().bfloat16().requires_grad_(), factor=s.factor.float()) for s in steps]
    matrix = weight.detach().float().requires_grad_()
    teacher = Teacher(readout(), DRAFT, torch.bfloat16)
    value, _ = vocabulary_loss(teacher, last.bfloat16(), tokens, low, matrix)
    assert abs(value.item() - expected.item()) < 0.01 * expected.item()
    (ours,), (theirs,) = torch.autograd.grad(value, [matrix]), torch.autograd.grad(expected, [weight])
    assert F.cosine_similarity(ours.flatten().double(), theirs.flatten(), 0) > 0.999


def test_evaluation_makes_no_gradient_and_the_same_value() -> None:
    last, tokens, steps, weight = case()
    teacher = Teacher(readout(), DRAFT, torch.float64)
    learnt, _ = vocabulary_loss(teacher, last, tokens, steps, weight)
    with torch.no_grad():
        value, _ = vocabulary_loss(teacher, last, tokens, steps, weight)
    assert not value.requires_grad
    torch.testing.assert_close(value, learnt.detach())


@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4),
    prompt_weight=st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=60, deadline=None)
def test_weights_are_those_of_the_plain_loop(masks: list[list[bool]], prompt_weight: float) -> None:
    batch = random_documents([(len(mask), 0) for mask in masks])
    batch.mask.copy_(torch.tensor([m for mask in masks for m in mask]))
    expected = torch.zeros(4, len(batch))
    for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
        for t in range(start, end):
            for k in range(4):
                if t + 2 + k < end:
                    expected[k, t] = 1 if batch.mask[t + 1 : t + 3 + k].all() else prompt_weight
    torch.testing.assert_close(weigh_chains(batch, 4, prompt_weight), expected)


def test_the_first_draft_counts_and_what_follows_the_end_does_not() -> None:
    batch = random_documents([(3, 4), (2, 3)])
    first = weigh_chains(batch, 2, 0.0)
    # Rows 2 and 8 are the last prompt tokens: from there the first draft of a request is made.
    assert first[0].nonzero()[:, 0].tolist() == [2, 3, 4, 8, 9]
    assert first[1].nonzero()[:, 0].tolist() == [2, 3, 8]


def with_columns(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of lm_head, where lm_head learns over so many columns of each chunk.

    The head's distribution is wide, so that the logarithm of an estimated partition sum has a small bias.
    """
    last, tokens, steps, weight = case()
    weight = (0.1 * weight).detach().requires_grad_()
    teacher = Teacher(readout(), DRAFT, torch.float64)
    value, _ = vocabulary_loss(teacher, last, tokens, steps, weight, columns=count, seed=seed)
    return value.detach(), torch.autograd.grad(value, weight)[0]


def test_some_columns_estimate_the_loss_and_its_gradient() -> None:
    """The mean over many seeds is near the whole softmax, nearer with more columns; all columns are exactly it."""
    value, gradient = with_columns(0, 0)
    assert torch.equal(with_columns(len(DRAFT), 0)[1], gradient) and torch.equal(with_columns(99, 0)[0], value)
    far = []
    for count, bound in ((8, 0.2), (11, 0.06)):  # two and two of the six and three columns left are sampled
        values, gradients = zip(*(with_columns(count, seed) for seed in range(200)), strict=True)
        assert 0 < torch.stack(values).std() < 0.1 * value
        torch.testing.assert_close(torch.stack(values).mean(), value, rtol=0.03, atol=0)
        mean = torch.stack(gradients).mean(0)
        far.append(((mean - gradient).norm() / gradient.norm()).item())
        assert far[-1] < bound
        seen = (gradients[0] != 0).any(-1)
        assert seen.sum() == count and not torch.equal(gradients[0], gradients[1])
    assert far[1] < far[0]


def test_the_same_seed_chooses_the_same_columns() -> None:
    assert torch.equal(with_columns(6, 3)[1], with_columns(6, 3)[1])


def test_scores_over_some_columns_name_draft_tokens() -> None:
    last, tokens, steps, weight = case()
    teacher = Teacher(readout(), DRAFT, torch.float64)
    _, whole = vocabulary_loss(teacher, last, tokens, steps, weight, detail=True)
    _, some = vocabulary_loss(teacher, last, tokens, steps, weight, detail=True, columns=11, seed=1)
    same = (whole[0].choice == some[0].choice).double().mean()
    assert 0.5 < same < 1  # the head's best token is chosen for certain, or it is another one
    assert torch.equal(whole[0].hit[whole[0].choice == some[0].choice], some[0].hit[whole[0].choice == some[0].choice])
    assert (whole[0].alpha - some[0].alpha).abs().mean() < 0.1
