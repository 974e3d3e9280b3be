"""Rows, ratios, table and picture from measurements with known numbers."""

from __future__ import annotations

import pytest
from peagle_reports import measurements, peagle_report
from PIL import Image
from rich.console import Console

from benchmarks.peagle_report import (
    Row,
    build_rows,
    draft_time_ratio,
    draw_peagle,
    peagle_table,
    summary_lines,
)
from eagle_plugin.bench.drawing import PictureError


def row_of(rows: list[Row], kind: str, form: str, k: int, concurrency: int = 1) -> Row:
    (found,) = [x for x in rows if (x.kind, x.form, x.k, x.concurrency) == (kind, form, k, concurrency)]
    return found


def test_a_row_per_server_and_number_of_clients():
    rows = build_rows("sglang", measurements())
    assert len(rows) == 2 * 2 * 7
    plain, ours = row_of(rows, "plain", "tree", 0), row_of(rows, "peagle", "tree", 7)
    assert (plain.shape, plain.accept_length, plain.draft_ms, plain.ratio_vs_plain) == ("0/1/1", None, None, None)
    assert (ours.shape, ours.tokens_per_s, ours.accept_length, ours.draft_ms) == ("7/2/16", 36.0, 2.0, 3.6)
    # Repeat by repeat: the slow second one changes both sides alike.
    assert ours.ratio_vs_plain == 1.8 and ours.ratio_vs_eagle3 == 1.2
    assert ours.spread.ratio_vs_plain.q1 == ours.spread.ratio_vs_plain.q3 == 1.8
    assert ours.spread.tokens_per_s.q1 < ours.spread.tokens_per_s.q3
    assert (ours.memory_mib, ours.steal, ours.others, ours.repeats) == (1507.0, 0.01, 0.25, 3)
    assert row_of(rows, "eagle3", "chain", 3).ratio_vs_eagle3 is None


def test_a_row_is_compared_with_its_own_group_and_shape():
    changed = [
        one.model_copy(update={"tokens_per_s": 9 * one.tokens_per_s})
        if one.form == "chain" and (one.kind == "plain" or (one.kind == "eagle3" and one.shape[0] == 3))
        else one
        for one in measurements()
    ]
    rows = build_rows("sglang", changed)
    assert row_of(rows, "peagle", "tree", 3).ratio_vs_plain == 1.8
    assert row_of(rows, "peagle", "chain", 3).ratio_vs_plain == 0.2
    assert row_of(rows, "peagle", "chain", 7).ratio_vs_eagle3 == 1.2
    assert row_of(rows, "peagle", "chain", 3).ratio_vs_eagle3 == pytest.approx(0.133)


def test_the_ratio_of_draft_times():
    rows = build_rows("sglang", measurements())
    assert draft_time_ratio(rows, "peagle") == 1.25  # 4.0 ms over 3.2 ms
    assert draft_time_ratio(rows, "eagle3") == 5.0  # ten forwards over two
    many = [row.model_copy(update={"draft_ms": 99.0}) if row.concurrency == 8 else row for row in rows]
    assert draft_time_ratio(many, "peagle") == 1.25  # of the fewest clients
    assert draft_time_ratio(build_rows("sglang", measurements(ks=(3, 7))), "peagle") is None
    assert draft_time_ratio([row for row in rows if row.form == "tree"], "peagle") is None


def test_servers_with_different_repeats_are_not_compared():
    with pytest.raises(ValueError, match="different repeats; run with --resume"):
        build_rows("sglang", [one for one in measurements() if one.kind != "plain" or one.repeat])


def printed(report) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(peagle_table(report))
    return capture.get()


def test_the_table_fits_and_names_everything():
    text = printed(peagle_report())
    for part in ("P-EAGLE", "EAGLE-3", "11/1/12", "11/2/24", "36.0", "1.80", "25%"):
        assert part in text
    assert "…" not in text


def test_the_summary_has_the_ratio():
    assert summary_lines(peagle_report())[0] == (
        "draft time of 11 levels over that of 3: P-EAGLE 1.25, below 1.3; EAGLE-3 5.00"
    )
    slow = peagle_report().model_copy(update={"draft_time_ratio_k11_over_k3": 1.3})
    assert "1.30, not below 1.3" in summary_lines(slow)[0]
    assert "--ks 3 11" in summary_lines(peagle_report(ks=(3, 7)))[0]


def test_the_picture(tmp_path):
    draw_peagle(peagle_report(), tmp_path / "all.png")
    with Image.open(tmp_path / "all.png") as picture:
        assert picture.size[0] > 1000
    without = peagle_report()
    for row in without.rows:
        row.spread.draft_ms = None
    with pytest.raises(PictureError, match="no server wrote one"):
        draw_peagle(without, tmp_path / "none.png")
    assert [path.name for path in tmp_path.iterdir()] == ["all.png"]
