"""Rows and summary of the serving benchmark, from known measurements."""

import pytest
from rich.console import Console
from serving_reports import MANY, ONE, RATES, measurement, measurements, serving_report

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.serving.report import build_rows, summarise
from eagle_plugin.bench.serving.table import serving_table, summary_lines
from eagle_plugin.policy.prediction_errors import CLASSES, class_of


def test_values_are_medians_and_ratios_are_taken_within_a_repeat():
    one, many = build_rows("sglang", measurements())
    assert (one.plain, one.builtin_chain, one.builtin_tree, one.fixed, one.plugin) == (20.0, 26.0, 30.0, 40.0, 45.0)
    assert one.best_alternative == "builtin_tree"
    # 45/30, 24/12 and 48/30: the ratio of the medians would be 1.5.
    assert one.ratio_vs_best_alternative == 1.6
    assert one.spread.ratio_vs_best_alternative is not None
    assert one.spread.ratio_vs_best_alternative.q1 == 1.55 and one.spread.ratio_vs_best_alternative.q3 == 1.8
    assert one.spread.ratio_vs_plain["builtin_chain"].median == 1.3 and "plain" not in one.spread.ratio_vs_plain
    assert many.best_alternative == "plain" and many.ratio_vs_best_alternative == 0.96 and many.repeats == 3


def test_processor_time_is_compared_with_the_cheapest_alternative():
    rates = {ONE: {"plain": [10.0], "builtin_chain": [20.0], "plugin": [30.0]}}
    (row,) = build_rows("vllm", measurements(rates))
    assert row.cpu_ratio_vs_best_alternative == pytest.approx(20 / 30, abs=1e-3)  # of the chain, not of plain
    assert row.cpu_seconds_per_token == {"plain": 0.15, "builtin_chain": 0.075, "plugin": 0.05}


def test_the_order_of_the_repeats_is_by_their_numbers():
    shuffled = [measurement(1, ONE, "plain", 10.0), measurement(0, ONE, "plain", 20.0)]
    shuffled += [measurement(0, ONE, "plugin", 40.0), measurement(1, ONE, "plugin", 20.0)]
    (row,) = build_rows("sglang", shuffled)
    assert row.ratio_vs_best_alternative == 2.0  # with the pairs crossed it would be 2.5


def test_what_was_not_measured_is_null():
    (row,) = build_rows("vllm", measurements({ONE: {"plain": [10.0], "plugin": [30.0]}}))
    assert row.builtin_tree is None and row.fixed is None and row.ratio_vs_fixed is None
    assert row.accept_length == {"plugin": 2.0}
    (alone,) = build_rows("vllm", measurements({ONE: {"plugin": [30.0]}}))
    assert alone.best_alternative is None and alone.ratio_vs_best_alternative is None
    empty = summarise([alone], [])
    assert (empty.geometric_mean_ratio_1_to_4, empty.worst_row, empty.worst_ratio_vs_fixed) == (None, None, None)


def test_different_repeats_are_refused():
    with pytest.raises(ValueError, match="1 client, T 0, mixed prompts: plugin and plain have different repeats"):
        build_rows("sglang", measurements({ONE: {"plain": [10.0, 11.0], "plugin": [30.0]}}))


def test_the_summary_has_the_mean_of_few_clients_and_the_worst_rows():
    four = Cell(4, 0.0, "mixed")
    rows = build_rows("sglang", measurements({**RATES, four: {"plain": [10.0], "fixed": [20.0], "plugin": [16.0]}}))
    summary = summarise(rows, [])
    assert summary.geometric_mean_ratio_1_to_4 == 1.6  # of 1.6 and 1.6; 16 clients have 0.96 and are not in it
    assert summary.worst_row is not None
    assert (summary.worst_row.concurrency, summary.worst_row.ratio) == (16, 0.96)
    assert summary.worst_ratio_vs_fixed == 0.8
    assert summary.worst_row_vs_fixed is not None and summary.worst_row_vs_fixed.concurrency == 4


def test_the_error_of_predictions_is_the_median_over_the_steps_of_all_repeats():
    """Not the mean or the median of the repeats' medians."""
    few, many = [0] * CLASSES, [0] * CLASSES
    few[class_of(1.9, 1.0)], many[class_of(1.13, 1.0)] = 2, 100
    timed = [
        measurement(repeat, ONE, "plugin", 10.0).model_copy(update={"prediction_errors": tuple(errors)})
        for repeat, errors in enumerate((few, many, few))
    ]
    others = [measurement(repeat, ONE, "fixed", 10.0) for repeat in range(3)]
    (row,) = build_rows("sglang", [*timed, *others])
    # Half of the 104 steps are 52 of the 100 between 0.12 and 0.15.
    assert row.prediction_error == pytest.approx(0.12 + 0.03 * 0.52, abs=1e-4)
    summary = summarise([row], [*timed, *others])
    assert summary.prediction_error == row.prediction_error
    report = serving_report()
    assert "off by 13.6% in the median" in "\n".join(summary_lines(report.model_copy(update={"summary": summary})))
    assert "predicted time" not in "\n".join(summary_lines(report))
    assert build_rows("sglang", others)[0].prediction_error is None


def test_steal_is_the_mean_of_what_is_known():
    known = [measurement(0, ONE, "plain", 10.0, steal=0.02), measurement(0, ONE, "plugin", 10.0, steal=0.04)]
    assert build_rows("sglang", known)[0].steal == 0.03
    assert build_rows("sglang", [measurement(0, ONE, "plain", 10.0, steal=None)])[0].steal is None


def test_the_table_shows_rates_ratios_and_summary():
    console = Console(width=80)
    report = serving_report()
    with console.capture() as capture:
        console.print(serving_table(report))
    text = capture.get() + "\n".join(summary_lines(report))
    assert "…" not in text  # it fits 80 characters
    for part in (
        "45.0",
        "1.60",
        "[1.55-1.80]",
        "[0.95-0.96]",
        " tree ",
        "geometric mean at 1 to 4 clients: 1.600",
        "the lowest: 0.960 (16 clients, T 0, mixed prompts)",
        "3 of 30 measured spans (10%)",
        "other processes used at most 25% of the machine",
    ):
        assert part in text, part
    without_tree = {cell: {c: v for c, v in rates.items() if c != "builtin_tree"} for cell, rates in RATES.items()}
    with console.capture() as capture:
        console.print(serving_table(serving_report(without_tree)))
    assert " tree " not in capture.get()


def test_many_clients_have_their_own_row():
    assert [row.concurrency for row in build_rows("sglang", measurements())] == [ONE.concurrency, MANY.concurrency]
