"""The verdict says what the measurements show, and no more."""

from __future__ import annotations

import random

import pytest
from states_reports import CELLS, measurement, measurements

from eagle_plugin.bench.states.document import Comparison, build_rows, compare, verdict
from eagle_plugin.bench.states.verdict import T_QUANTILES, describe, ratio_with_interval


def judge(speeds: dict, **options: object) -> tuple[Comparison, str]:
    ones = measurements(speeds, **options)  # type: ignore[arg-type]
    comparisons = compare(ones)
    whole = next(one for one in comparisons if one.concurrency is None and one.theirs == "base")
    return whole, verdict(comparisons, ones, "sglang 0.5.23")


def test_a_better_head_is_told_with_its_interval() -> None:
    one, text = judge({"none": 1.0, "base": 1.3, "trained": 1.6})
    assert one.finding == "more" and one.low is not None and one.high is not None
    assert one.low < 1.6 / 1.3 < one.high and one.high - one.low < 0.1
    assert text.startswith("The trained head serves 1.2") and "95 % interval" in text and text.count(". ") == 0
    assert text.index("the base head") < text.index("the target without EAGLE")
    assert text.endswith(
        "in sglang 0.5.23, at concurrency 1, 2, 4, 8, on the sets of prompts held-out, gsm8k, over 5 repeats."
    )


def test_a_worse_head_is_told_too() -> None:
    one, text = judge({"base": 1.6, "trained": 1.3})
    assert one.finding == "fewer" and one.high is not None and one.high < 1
    assert text.startswith("The trained head serves fewer output tokens per second than the base head: 0.8")
    assert "without EAGLE" not in text


def test_heads_that_are_alike_show_no_difference() -> None:
    one, text = judge({"base": 1.6, "trained": 1.6}, seed=1)
    assert one.finding == "no difference" and one.low is not None and one.low < 1 < one.high  # type: ignore[operator]
    assert text.startswith("There is no difference that this can show between the trained head and the base head")


def test_one_repeat_shows_nothing() -> None:
    one, text = judge({"base": 1.0, "trained": 2.0}, repeats=1)
    assert (one.finding, one.low, one.high) == ("unknown", None, None)
    assert text.startswith(
        "One repeat cannot show whether the trained head differs from the base head: it served 1.95 times"
    )
    assert text.endswith("over 1 repeat.")


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_the_verdict_seldom_finds_a_difference_that_is_not_there(repeats: int) -> None:
    """The control of the whole rule: without a difference 5 % of the intervals leave 1 out, whatever the repeats."""
    draw = random.Random(7)
    found = [
        ratio_with_interval([[draw.lognormvariate(0, 0.05) for _ in range(4)] for _ in range(repeats)]).finding
        for _ in range(1500)
    ]
    wrong = sum(finding != "no difference" for finding in found) / len(found)
    assert 0.035 < wrong < 0.065
    # And the same rule with the quantile of a normal distribution, the usual mistake with few repeats, would be wrong.
    assert T_QUANTILES[repeats - 2] > 1.2 * 1.96


def test_a_difference_that_is_there_is_found() -> None:
    draw = random.Random(8)
    found = [
        ratio_with_interval([[1.05 * draw.lognormvariate(0, 0.02) for _ in range(4)] for _ in range(5)]).finding
        for _ in range(300)
    ]
    assert found.count("more") > 270 and "fewer" not in found


def test_quantiles_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    wanted = [stats.t.ppf(0.975, freedom) for freedom in range(1, len(T_QUANTILES) + 1)]
    assert list(T_QUANTILES) == pytest.approx(wanted, abs=6e-4)


def test_more_repeats_than_quantiles_have_an_interval() -> None:
    one = ratio_with_interval([[2.0], [2.1]] * 20)
    assert one.finding == "more" and describe(one, "a", "b").startswith("a serves 2.05 times as many")


def test_a_ratio_needs_both_states() -> None:
    with pytest.raises(ValueError, match="--resume|run with"):
        ratio_with_interval([])


def test_only_whole_repeats_are_compared_over_all_cells() -> None:
    """A slow cell that is missing in one repeat would change the mix of that repeat."""
    ones = measurements({"base": 1.0, "trained": 1.0}, repeats=3, noise=0.0)
    extra = [measurement(3, CELLS[0], state, rate) for state, rate in (("base", 1.0), ("trained", 9.0))]  # type: ignore[arg-type]
    comparisons = compare([*ones, *extra])
    assert comparisons[0].concurrency is None and comparisons[0].ratio == 1.0
    assert comparisons[1].ratio > 1.5  # of that cell alone


def test_rows_have_quartiles_and_depths() -> None:
    rows = build_rows(measurements())
    assert len(rows) == 3 * len(CELLS) and {row.repeats for row in rows} == {5}
    row = next(row for row in rows if row.state == "trained")
    assert row.tokens_per_s.q1 < row.tokens_per_s.median < row.tokens_per_s.q3
    assert row.accepted_by_depth == [0.75, 0.5] and row.accept_length is not None and row.accept_length.median == 2.25
    plain = next(row for row in rows if row.state == "none")
    assert plain.accepted_by_depth == [] and plain.accept_length is None
