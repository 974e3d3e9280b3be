"""The animated answers of the demo: every piece is hidden until it arrived, and all of the text is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from demo_reports import demo_report

from benchmarks import figures as drawing
from eagle_plugin.bench.animation import COLUMNS, WIDTH, draw_answers
from eagle_plugin.bench.report import DemoReport, ShownAnswer, ShownQuestion

SVG = "{http://www.w3.org/2000/svg}"
LONG = "and a line that is longer than one line of the picture has columns\r\n"
PIECES = {
    "plain decoding": [
        (0.1, "Here is "), (0.25, "the code:\n\n    if a < b & c:\n"), (0.5, "\treturn 'x'\x0b\n"), (0.75, "z" * 70),
    ],
    "eagle-plugin": [(0.1, "Here is the code:"), (0.2, "\n\n"), (0.25, LONG), (0.4, " end")],
}  # fmt: skip


def report() -> DemoReport:
    answers = [ShownAnswer(title=title, speed="10.0 tokens/s", pieces=pieces) for title, pieces in PIECES.items()]
    return demo_report().model_copy(update={"shown": [ShownQuestion(prompt="How is <this> done?", answers=answers)]})


def columns(path: Path) -> dict[float, list[list[tuple[float, str]]]]:
    """The lines of each column by its left edge: the seconds for which a part is hidden, and its text."""
    found: dict[float, list[list[tuple[float, str]]]] = {}
    for line in ElementTree.parse(path).iter(f"{SVG}text"):
        if "class" not in line.attrib:
            parts = []
            for part in line:
                (hidden,) = part
                assert (hidden.get("attributeName"), hidden.get("to")) == ("visibility", "hidden")
                assert hidden.get("begin") == "loop.begin"
                parts.append((float(hidden.get("dur", "").rstrip("s")), part.text or ""))
            found.setdefault(float(line.get("x", "")), []).append(parts)
    return found


def test_every_piece_appears_when_it_arrived_and_no_text_is_lost(tmp_path: Path) -> None:
    draw_answers(report(), tmp_path / "demo.svg")
    for lines, pieces in zip(columns(tmp_path / "demo.svg").values(), PIECES.values(), strict=True):
        found = ["".join(text for _, text in line) for line in lines]
        assert max(map(len, found)) <= COLUMNS
        whole = "".join(piece for _, piece in pieces)
        assert "".join(found).replace(" ", "") == re.sub(r"\s", "", whole)
        by_time: dict[float, str] = {}
        for at, text in (part for line in lines for part in line):
            by_time[at] = by_time.get(at, "") + text.replace(" ", "")
        assert by_time == {at: re.sub(r"\s", "", piece) for at, piece in pieces if piece.strip()}


def test_the_picture_starts_again_after_the_last_piece_and_says_what_was_measured(tmp_path: Path) -> None:
    draw_answers(report(), tmp_path / "demo.svg")
    tree = ElementTree.parse(tmp_path / "demo.svg").getroot()
    (loop,) = [one for one in tree.iter(f"{SVG}set") if one.get("id") == "loop"]
    assert loop.get("begin") == "0s;loop.end" and float(loop.get("dur", "").rstrip("s")) > 0.75
    told = " ".join(one.text or "" for one in tree.iter(f"{SVG}text") if "class" in one.attrib)
    for part in (
        "How is <this> done?",
        "plain decoding: 10.0 tokens/s",
        "eagle-plugin: 10.0",
        "sglang 0.5.23",
        "2026-01-01",
    ):
        assert part in told
    assert tree.get("viewBox", "").startswith(f"0 0 {WIDTH} ")
    with pytest.raises(ValueError, match="no answers"):
        draw_answers(demo_report(), tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_the_figure_of_the_documents_is_taken_from_a_demo_and_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drawing, "DOCS", tmp_path)
    monkeypatch.setattr(drawing, "draw_all", lambda docs: [])
    for name in ("images", "figures"):
        (tmp_path / name).mkdir()
    (tmp_path / "demo.json").write_text(report().model_dump_json())
    assert drawing.main(["--answers", str(tmp_path / "demo.json")]) == 0
    drawn = (tmp_path / "images/answers.svg").read_bytes()
    drawing.record_answers(tmp_path / "figures/answers.json", tmp_path)
    assert (tmp_path / "images/answers.svg").read_bytes() == drawn
    (tmp_path / "demo.json").write_text(demo_report().model_dump_json())
    assert drawing.main(["--answers", str(tmp_path / "demo.json")]) == 1
    assert "is no report of a demo with answers" in capsys.readouterr().err
    assert (tmp_path / "images/answers.svg").read_bytes() == drawn


def test_the_picture_of_the_documents_is_that_of_its_record() -> None:
    docs = Path(drawing.__file__).parents[1] / "docs"
    (shown,) = json.loads((docs / "figures/answers.json").read_text())["shown"]
    for lines, answer in zip(columns(docs / "images/answers.svg").values(), shown["answers"], strict=True):
        found = "".join(text for line in lines for _, text in line)
        assert found.replace(" ", "") == re.sub(r"\s", "", "".join(piece for _, piece in answer["pieces"]))
        assert lines[-1][-1][0] == pytest.approx(answer["pieces"][-1][0], abs=0.006)
