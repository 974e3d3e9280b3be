"""`make figures`: the figures of the documents show their reports, which are the tables of the documents."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from demo_reports import bar_heights
from document_commands import ROOT
from peagle_reports import peagle_report
from PIL import Image, ImageColor

from benchmarks import figures
from eagle_plugin.bench.picture import COLOURS

DOCS = ROOT / "docs"


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The figures of the repository, to be drawn anew."""
    for name in ("figures", "images"):
        shutil.copytree(DOCS / name, tmp_path / "docs" / name)
    monkeypatch.setattr(figures, "DOCS", tmp_path / "docs")
    return tmp_path / "docs"


def test_the_report_of_the_demo_is_the_table_of_the_document() -> None:
    section = (DOCS / "performance.md").read_text("utf-8").partition("## One request at a time")[2].partition("###")[0]
    quartiles = r"([\d.]+)x? \[([\d.]+)-([\d.]+)\]"
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = {line.split("|")[1].strip(): re.findall(quartiles, line) for line in lines}
    spread = json.loads((DOCS / "figures/demo.json").read_text("utf-8"))["spread"]
    recorded = [tuple(spread[name][part] for part in ("median", "q1", "q3")) for name in spread]
    shown = rows["tokens/s"] + rows["against plain"]
    assert recorded == [tuple(map(float, values)) for values in shown] and len(shown) == 5


def test_the_figures_are_those_of_their_reports(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {path.name: path.read_bytes() for path in (docs / "images").iterdir()}
    assert figures.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("demo.png", "demo-dark.png"):
        for colour in COLOURS:
            heights = bar_heights(docs / "images" / name, colour)
            assert heights == bar_heights(DOCS / "images" / name, colour) and len(heights) == 2
        with Image.open(docs / "images" / name) as picture:
            paper = picture.convert("RGB").getpixel((0, 0))
        assert paper == ImageColor.getrgb(figures.PAPER if "dark" in name else "#ffffff")
    assert (docs / "images/answers.svg").read_bytes() == kept["answers.svg"]
    for name in kept.keys() - {"demo.png", "demo-dark.png", "answers.svg"}:  # by name, and as they were
        assert f"docs/images/{name} stays as it is" in printed and (docs / "images" / name).read_bytes() == kept[name]


def test_a_new_report_is_recorded_and_drawn(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "peagle.json").write_text(peagle_report().model_dump_json())
    assert figures.main(["--record", str(tmp_path / "peagle.json")]) == 0
    sizes = [(docs / "images" / name).stat().st_size for name in ("peagle.png", "peagle-dark.png")]
    assert (
        min(sizes) > 10_000 and (docs / "figures/peagle.json").read_bytes() == (tmp_path / "peagle.json").read_bytes()
    )


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("demo.json", "{}", "is no report of this figure: .* has no attribute"),
        ("demo.json", "[", "is no report of this figure: Expecting value"),
        ("other.json", "{}", "no figure is drawn from .*other.json: wanted demo.json, peagle.json"),
        ("peagle.json", None, "No such file"),
    ],
)
def test_what_cannot_be_drawn_changes_nothing(
    name: str, text: str | None, sentence: str, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    before = {path: path.read_bytes() for path in docs.rglob("*.*")}
    assert figures.main(["--record", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert re.search(f"^figures: .*{sentence}", error) and error.count("\n") == 1
    assert {path: path.read_bytes() for path in docs.rglob("*.*")} == before
