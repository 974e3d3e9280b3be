"""The picture shows the report: the heights of its bars are the medians."""

import sys

import pytest
from demo_reports import bar_heights, demo_report

from eagle_plugin.bench.drawing import PictureError
from eagle_plugin.bench.picture import COLOURS, draw_demo


def test_bars_are_as_high_as_the_medians(tmp_path):
    report = demo_report()
    path = tmp_path / "out" / "demo.png"
    draw_demo(report, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["demo.png"]
    plain, builtin, plugin = (bar_heights(path, colour) for colour in COLOURS)
    assert len(plain) == len(builtin) == len(plugin) == 2  # tokens per second, and the ratio
    spread = report.spread
    for side, medians in enumerate(
        [
            (spread.builtin_tokens_per_s, spread.plugin_tokens_per_s),
            (spread.builtin_speedup_vs_plain, spread.speedup_vs_plain),
        ]
    ):
        base = spread.plain_tokens_per_s.median if side == 0 else 1.0
        assert builtin[side] / plain[side] == pytest.approx(medians[0].median / base, rel=0.03)
        assert plugin[side] / plain[side] == pytest.approx(medians[1].median / base, rel=0.03)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PictureError, match="no picture: matplotlib.figure is not installed.*pip install matplotlib"):
        draw_demo(demo_report(), tmp_path / "demo.png")
    assert list(tmp_path.iterdir()) == []
