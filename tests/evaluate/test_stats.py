"""Statistics of accept lengths: their values by hand, and whether their intervals hold."""

from __future__ import annotations

import pytest
import torch

from eagle_plugin.learning.evaluate.stats import AcceptCounts, gain, paired_difference, summarize


def count(rounds: int, *accepted: int) -> AcceptCounts:
    return AcceptCounts("chat", rounds, torch.tensor(accepted, dtype=torch.float64))


def test_stats_by_hand() -> None:
    """Ten rounds in two responses: 6 accept a draft, 3 of these a second one. Rounds count, not responses."""
    stats = summarize([count(8, 6, 3), count(2, 0, 0), count(0, 0, 0)])
    assert stats is not None
    assert stats.accept_length == pytest.approx(1.9) and stats.rounds == 10 and stats.prompts == 2
    assert stats.cumulative == pytest.approx([0.6, 0.3]) and stats.conditional == pytest.approx([0.6, 0.5])
    assert stats.low < 1.9 < stats.high
    assert stats.to_json()["drafts_accepted"] == 0.9
    assert summarize([count(0, 0, 0)]) is None


def prompts(n: int, gen: torch.Generator) -> list[AcceptCounts]:
    """Prompts that differ in how easy they are: accept length 1.5 in the mean, 20 rounds each."""
    ease = torch.rand(n, generator=gen)
    return [count(20, int((torch.rand(20, generator=gen) < p).sum())) for p in ease]


def test_interval_covers_the_truth() -> None:
    """Of 200 samples of 40 prompts about 95 % have the true mean in their interval."""
    gen = torch.Generator().manual_seed(0)
    found = [summarize(prompts(40, gen)) for _ in range(200)]
    covered = sum(f is not None and f.low < 1.5 < f.high for f in found)
    assert 178 <= covered <= 199
    # Negative control: an interval that takes the 800 rounds for independent is too narrow.
    naive = 1.96 * (0.25 / 800) ** 0.5
    assert sum(f is not None and abs(f.accept_length - 1.5) < naive for f in found) < 170


def test_gain_is_paired() -> None:
    """A head that is a little better on every prompt is found better, although prompts differ much more."""
    gen = torch.Generator().manual_seed(1)
    old = prompts(40, gen)
    new = [t._replace(accepted=(t.accepted + 1).clamp(max=20)) for t in old]
    mean, low, high = gain(new, old)
    assert 0 < low < mean < high < 0.06
    a, b = summarize(old), summarize(new)
    assert a is not None and b is not None and b.low < a.high  # not by the intervals of each
    assert gain(old, old) == (0, 0, 0)
    mean, low, high = paired_difference(torch.tensor([2.0, 5.0, 9.0]), torch.tensor([1.0, 4.5, 8.0]))
    assert 0.5 <= low < mean < high <= 1 and mean == pytest.approx(2.5 / 3)
