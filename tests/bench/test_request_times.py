"""TTFT, TPOT, ITL and OTPS under speculation."""

from __future__ import annotations

import pytest

from eagle_plugin.bench.load import Completion
from eagle_plugin.bench.request_times import accepted_counts, median_times, tpot_s
from eagle_plugin.bench.stream_fields import Output


def answer(tokens: int, gaps: tuple[float, ...], ttft: float = 0.5, accepted: tuple[int, ...] = ()) -> Completion:
    return Completion("q", Output(), "length", 1, tokens, ttft, ttft + sum(gaps), gaps, None, accepted)


def test_itl_is_of_chunks_and_tpot_of_tokens() -> None:
    """Four chunks of three tokens each after the first token: a round takes 0.3 s, a token 0.1 s."""
    times = median_times([answer(13, (0.3,) * 4)])
    assert times == pytest.approx((500, 100, 300, 10))
    # Without speculation every chunk has one token, and both are the same.
    assert median_times([answer(5, (0.3,) * 4)]) == pytest.approx((500, 300, 300, 1 / 0.3))


def test_the_first_token_is_no_part_of_tpot() -> None:
    assert tpot_s(answer(11, (1.0,), ttft=9.0)) == pytest.approx(0.1)


def test_answers_of_one_token_have_only_a_ttft() -> None:
    assert tpot_s(answer(1, ())) is None
    assert median_times([answer(1, ())]) == (500, None, None, None)
    assert median_times([answer(1, ()), answer(3, (0.2, 0.2))])[1:] == pytest.approx((200, 200, 5))


def test_rounds_are_counted_by_depth() -> None:
    """4 rounds accepted no draft, 3 one and 3 two; the requests have histograms of different lengths."""
    counts = accepted_counts([answer(9, (), accepted=(3, 2, 3)), answer(9, (), accepted=(1, 1)), answer(9, ())])
    assert counts == [10, 6, 3]
    assert accepted_counts([answer(9, ())]) == []
