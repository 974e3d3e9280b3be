"""The noise of draws: its distribution, what it depends on, and drafts that share it."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from torch import Tensor

from eagle_plugin.core import gumbel
from eagle_plugin.core.gumbel import draw_tokens, gumbel_noise, noise_of_all
from eagle_plugin.core.propose import propose
from eagle_plugin.core.sampling import Filters, SamplingParams, target_distribution

ALARM, CAUGHT = 1e-4, 1e-12
DRAWS, V = 20_000, 40


def keys(n: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))


def g_test(counts: Tensor, p: Tensor) -> float:
    """The p-value of counts [n] under probabilities p [n]; cells that expect fewer than 5 are pooled."""
    wanted = p * counts.sum()
    large = wanted >= 5
    counts, wanted = (torch.cat([x[large], x[~large].sum()[None]]) for x in (counts.double(), wanted))
    if wanted[-1] == 0:
        assert counts[-1] == 0
        counts, wanted = counts[:-1], wanted[:-1]
    statistic = 2 * torch.special.xlogy(counts, counts / wanted).sum()
    return float(scipy.stats.chi2.sf(float(statistic), len(counts) - 1))


def test_noise_is_of_key_position_and_token_alone() -> None:
    tokens = torch.tensor([[5, 1, 130_000], [2, 5, 7]])
    noise = gumbel_noise(torch.tensor([3, 3]), torch.tensor([9, 9]), tokens)
    assert noise[0, 0] == noise[1, 1]
    assert len(noise.unique()) == 5
    for other in ((4, 9), (3, 10), (3, 9 + 2**33)):
        assert not (gumbel_noise(*(torch.tensor([x]) for x in other), tokens[:1]) == noise[:1]).any()


@pytest.mark.parametrize("vocabulary", [1, 8, 127])
def test_the_noise_of_all_tokens_is_that_of_each(vocabulary: int) -> None:
    given = keys(7), torch.arange(7) * 2**30
    wanted = gumbel_noise(*given, torch.arange(vocabulary).expand(7, -1))
    assert torch.equal(noise_of_all(*given, vocabulary), wanted)


def test_noise_has_gumbels_distribution() -> None:
    noise = gumbel_noise(keys(500), torch.arange(500), torch.arange(40).expand(500, -1)).flatten().numpy()
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > ALARM
    assert scipy.stats.kstest(noise * 1.2, "gumbel_r").pvalue < CAUGHT


def test_no_bits_give_an_infinite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros and ones come once in 2^32 numbers each: what a draw would make of an infinity is no distribution."""
    extremes = tuple(torch.tensor([[bits]]) for bits in (0, 2**32 - 1, 2**31, 2**31))
    monkeypatch.setattr(gumbel, "random_bits", lambda *_: extremes)
    least, most, *middle = noise_of_all(torch.tensor([0]), torch.tensor([0]), 4)[0].tolist()
    assert (least, most) == pytest.approx((-3.1300, 22.8739), abs=1e-3)
    assert middle == pytest.approx([0.3665, 0.3665], abs=1e-3)


@pytest.mark.parametrize("filters", ["joint", "chained"])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}], ids=str)
def test_a_draw_has_the_targets_distribution(given: dict[str, float], filters: Filters) -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(7)) * 2
    params = SamplingParams.of(1, **given)  # type: ignore[arg-type]
    rows = DRAWS, -1
    drawn = draw_tokens(logits.expand(*rows), params.for_rows(DRAWS), keys(DRAWS), torch.arange(DRAWS), filters)
    counts, p = torch.bincount(drawn, minlength=V), target_distribution(logits, params, filters)[0]
    assert g_test(counts, p) > ALARM
    warmer = params._replace(temperatures=params.temperatures * 1.3)
    assert g_test(counts, target_distribution(logits, warmer, filters)[0]) < 1e-6


def test_draws_at_two_positions_are_independent() -> None:
    """The control draws both at one position: then the first one tells the second."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(8)).expand(DRAWS, -1)
    params, p = SamplingParams.of(DRAWS), logits[0].double().softmax(0)
    pairs = (p[:, None] * p).flatten()
    for step, passes in ((1, True), (0, False)):
        first, second = (draw_tokens(logits, params, keys(DRAWS), torch.full((DRAWS,), 5 + x)) for x in (0, step))
        found = g_test(torch.bincount(first * 6 + second, minlength=36), pairs)
        assert found > ALARM if passes else found < CAUGHT


def test_a_draft_with_the_same_noise_finds_what_is_drawn() -> None:
    """As often as one draw may be guessed: of equal distributions always, with other noise by chance."""
    g = torch.Generator().manual_seed(9)
    logits = torch.randn(1, V, generator=g).expand(DRAWS, -1)
    near = logits + 0.7 * torch.randn(1, V, generator=g)
    params, places = SamplingParams.of(DRAWS), torch.arange(DRAWS)
    drawn = draw_tokens(logits, params, keys(DRAWS), places)
    overlap = float(torch.minimum(logits[0].softmax(0), near[0].softmax(0)).sum())

    def found(head: Tensor, rng_keys: Tensor, k: int = 1) -> float:
        logp, index = head.log_softmax(1).sort(dim=1, descending=True)
        scores, tokens = propose(logp, index, params, rng_keys, places, k, sharpness=1.0)
        assert (scores <= 0).all() and (scores.diff(dim=1) <= 0).all()
        return float((tokens == drawn[:, None]).any(dim=1).double().mean())

    assert found(logits, keys(DRAWS)) == 1
    assert overlap / (2 - overlap) < found(near, keys(DRAWS)) < overlap
    assert found(near, keys(DRAWS, seed=1)) < overlap / 4 < found(near, keys(DRAWS), 2) / 4


def test_children_of_greedy_rows_and_of_filtered_ones() -> None:
    logp, index = torch.randn(2, V, generator=torch.Generator().manual_seed(3)).log_softmax(1).sort(descending=True)
    params = SamplingParams(
        *(torch.cat(x) for x in zip(SamplingParams.greedy(1), SamplingParams.of(1, top_k=2), strict=True))
    )
    to_target = torch.randperm(V, generator=torch.Generator().manual_seed(4))
    scores, tokens = propose(logp, index, params, keys(2), torch.zeros(2).long(), 3, to_target)
    assert torch.equal(tokens[0], to_target[index[0, :3]]) and torch.equal(scores[0], logp[0, :3])
    assert set(tokens[1, :2].tolist()) == set(to_target[index[1, :2]].tolist())
    assert scores[1, 2] == -torch.inf and scores[1, :2].exp().sum() == pytest.approx(1)
