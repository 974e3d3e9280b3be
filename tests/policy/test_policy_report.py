"""What a policy reports: numbers that come from it, and the JSON form that other processes read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.prediction_errors import CLASSES
from eagle_plugin.policy.report import (
    Expected,
    PolicyReport,
    ReportError,
    ShapeTotals,
    accept_length,
    difference,
    sum_of,
    tokens_per_second,
)

SMALL, CAPS = Shape(1, 1, 2), Shape(2, 4, 8)
REPORT = PolicyReport(
    mode="auto",
    caps=CAPS,
    present=CAPS,
    requests=2,
    prefix_tokens=700,
    slowdown=1.25,
    factors=(1.5, 0.5),
    totals={PLAIN: ShapeTotals(4, 4, 2, 1, 0.02, 0.025), CAPS: ShapeTotals(10, 25, 5, 4, 0.2, 0.1)},
    expected={PLAIN: Expected(0.02, 1.0), SMALL: Expected(0.03, 1.6), CAPS: Expected(0.05, 3.0)},
)


def test_rates_and_gains() -> None:
    assert list(REPORT.rates()) == [CAPS, SMALL, PLAIN]
    assert list(REPORT.rates().values()) == pytest.approx([120.0, 3.2 / 0.03, 100.0])
    assert REPORT.gain(CAPS) == pytest.approx(1.2) and REPORT.gain(PLAIN) == 1.0
    assert REPORT.next_best() == SMALL and REPORT._replace(present=PLAIN).next_best() == CAPS
    assert REPORT._replace(expected={CAPS: Expected(1.0, 1.0)}).next_best() is None


def test_the_json_form_is_one_line_and_comes_back() -> None:
    text = REPORT.as_json()
    assert "\n" not in text and json.loads(text)["version"] == 1
    assert PolicyReport.from_json(text) == REPORT
    third = REPORT._replace(slowdown=1 / 3)
    assert PolicyReport.from_json(third.as_json()).slowdown == 0.333333


def test_what_the_head_reads_of_prompts_counts_against_drafts() -> None:
    report = REPORT._replace(reading=0.125)
    assert PolicyReport.from_json(report.as_json()) == report
    for shape, (seconds, tokens) in report.expected.items():
        share = 0 if shape == PLAIN else report.requests * tokens * 0.125
        assert report.rates()[shape] == pytest.approx(report.requests * tokens / (seconds + share))
    assert report.gain(report.present) < REPORT.gain(report.present)


def test_phases_and_errors_come_back_and_may_be_missing() -> None:
    """A server of an earlier version has none."""
    report = REPORT._replace(phases={"draft": 0.5, "verify": 1.25}, errors=tuple(range(CLASSES)))
    assert PolicyReport.from_json(report.as_json()) == report
    old = {name: value for name, value in json.loads(report.as_json()).items() if name not in ("phases", "errors")}
    assert PolicyReport.from_json(json.dumps(old)) == REPORT
    with pytest.raises(ReportError, match=f"errors has 2 classes, wanted {CLASSES}"):
        PolicyReport.from_json(json.dumps(old | {"errors": [1, 2]}))


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(REPORT.as_json()).items() if key != name}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSONDecodeError"),
        ("[" * 100_000, "Recursion|Decode"),
        ("[]", "TypeError"),
        (json.dumps(without("factors")), "no 'factors'"),
        (json.dumps(without("") | {"version": 2}), "version is 2, wanted 1"),
        (json.dumps(without("") | {"caps": "2/4"}), "ValueError"),
        (json.dumps(without("") | {"slowdown": 0}), "0 is not positive"),
        (json.dumps(without("") | {"totals": {"2/4/8": [1, 2]}}), "ValueError"),
        (json.dumps(without("") | {"totals": {"2/4/8": [1, 2, 3, 4, -1.0, 0]}}), "-1.0 is no number from 0 on"),
        (json.dumps(without("") | {"expected": {"2/4/8": [True, 1]}}), "True is no number"),
        (json.dumps(without("") | {"expected": {"2/4/8": [0.0, 1]}}), "0.0 is not positive"),
        (REPORT.as_json().replace("1.25", "NaN"), "nan is no number"),
    ],
)
def test_what_is_no_report(text: str, why: str) -> None:
    with pytest.raises(ReportError, match=why):
        PolicyReport.from_json(text)


def test_sums_and_differences() -> None:
    before = {CAPS: ShapeTotals(4, 10, 2, 1, 0.1, 0.05), PLAIN: REPORT.totals[PLAIN]}
    added = difference(REPORT.totals, before)
    assert added == {CAPS: pytest.approx((6, 15, 3, 3, 0.1, 0.05))}
    assert difference(REPORT.totals, {}) == REPORT.totals
    assert sum_of(REPORT.totals.values()) == pytest.approx((14, 29, 7, 5, 0.22, 0.125))
    assert sum_of([]) == ShapeTotals()


def test_accept_length_is_that_of_rounds_that_drafted() -> None:
    assert accept_length(REPORT.totals) == 2.5
    assert accept_length({PLAIN: REPORT.totals[PLAIN]}) is None


def test_tokens_per_second_of_decode_steps() -> None:
    """A step without a time takes the mean of its shape: 2 * 0.02 s and 5 * 0.05 s."""
    assert tokens_per_second(REPORT.totals) == pytest.approx(29 / 0.29)
    assert tokens_per_second({CAPS: ShapeTotals(10, 25, 5)}) is None
