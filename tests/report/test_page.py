"""The page of a benchmark: what is on it, what never is, and what happens without its optional inputs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from states_reports import measurements, states_report

from eagle_plugin import cli
from eagle_plugin.learning.report import page
from eagle_plugin.learning.report.inputs import ReportError, read_inputs
from eagle_plugin.learning.report.page import LARGEST, write_report
from eagle_plugin.learning.report.svg import COLOURS, MARKERS
from eagle_plugin.learning.report.tables import COLUMNS

ATTACK = "head<script>alert(1)</script>\"'|*x* $y$"
STATS = {"accept_length": 2.0, "low": 1.9, "high": 2.1, "cumulative": [0.6, 0.4], "conditional": [0.6, 0.7],
         "prompts": 40, "rounds": 400.0, "drafts_accepted": 1.0}  # fmt: skip


class Page(HTMLParser):
    """The tags, ids, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, *names: str) -> list[str]:
        return [value for name, value in self.attributes if name in names]


def make(folder: Path, name: str = "trained", optional: bool = True) -> tuple[Page, str, str]:
    """The page, its source and the Markdown."""
    folder.mkdir(exist_ok=True)
    (folder / "states.json").write_text(states_report(name=name).model_dump_json())
    if optional:
        points = [
            {"update": n, "tokens": n * 1e5, "seconds": n, "total_loss": 3 - n / 9, "accuracy": [0.5],
             "acceptance": [0.4 + n / 30, 0.3, 0.2]}
            for n in range(6)
        ]  # fmt: skip
        (folder / "curve.json").write_text(json.dumps({"held_out": points}))
        heads = {head: {"gsm8k": {"chain4_t0": STATS, "tree16_t0": STATS}} for head in ("base", name)}
        (folder / "heads-details.json").write_text(json.dumps(heads))
    html, markdown = write_report(folder)
    return Page(html.read_text()), html.read_text(), markdown.read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str, str]:
    """A page with everything."""
    return make(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are what takes time: these pages have none."""
    sections = ("load", "acceptance", "calibration", "curve")
    monkeypatch.setattr(page, "_pictures", lambda inputs: {f"{name}_pictures": [] for name in sections})


def test_the_page_has_table_pictures_verdict_and_what_repeats_it(whole: tuple[Page, str, str]) -> None:
    found, text, markdown = whole
    report = states_report()
    for content in (found.text, markdown):
        assert report.verdict in content and "eagle-plugin benchmark smol --head trained" in content
        assert all(name in content for name in COLUMNS)
        assert "c" * 64 in content and "2.9.1" in content and "of split train left out" in content
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == ["Read this with care", "Under load", "Ratios", "Acceptance", "Calibration", "Training",
                        "What the columns mean", "Repeat it"]  # fmt: skip
    assert found.tags.count("svg") == 4 + 3 + 1 + 2 == len([one for one in found.values("role") if one == "img"])
    row = next(row for row in report.rows if row.state == "trained")
    assert f"{row.tokens_per_s.median:.1f}" in found.text and f"| {row.tokens_per_s.median:.1f} (" in markdown


def test_every_picture_has_a_text_alternative_with_its_numbers(whole: tuple[Page, str, str]) -> None:
    found, _, _ = whole
    labels = [label for label in found.values("aria-label") if label]
    assert len(labels) == 10 and all(len(re.findall(r"\d", label)) > 3 for label in labels)
    assert any("no EAGLE 1.6" not in label and label.startswith("TPOT") for label in labels)


def test_the_page_needs_no_network_and_no_script(whole: tuple[Page, str, str]) -> None:
    found, text, _ = whole
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(found.tags)
    assert "http" not in text and "@import" not in text and "javascript" not in text.lower()
    assert all(value.startswith("#") for value in found.values("href", "src", "xlink:href", "srcset"))
    assert all(value.startswith("#") for value in re.findall(r"url\(([^)]*)\)", text))
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert len(text.encode()) < LARGEST / 5


def test_ids_are_unique_and_references_lead_somewhere(whole: tuple[Page, str, str]) -> None:
    found, text, _ = whole
    ids = found.values("id")
    assert ids and len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    assert used and used <= set(ids)


def test_names_of_users_are_text(tmp_path: Path) -> None:
    found, text, markdown = make(tmp_path, ATTACK)
    assert "script" not in found.tags and ATTACK in found.text
    assert "<script" not in text and "&lt;script&gt;" in text
    assert r"head&lt;script&gt;alert(1)&lt;/script&gt;" in markdown and r"\|\*x\* \$y\$" in markdown
    literal = [line for line in markdown.splitlines() if "<script" in line]
    assert all(line.startswith("    eagle-plugin benchmark") for line in literal)  # a block of code


def test_without_escaping_the_name_would_be_a_script(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the test above sees a page that does not escape."""
    real = page._environment
    monkeypatch.setattr(page, "_environment", lambda **options: real(**(options | {"autoescape": False})))
    found, _, _ = make(tmp_path, ATTACK)
    assert "script" in found.tags


def test_optional_inputs_may_be_missing(tmp_path: Path) -> None:
    found, text, markdown = make(tmp_path, optional=False)
    assert found.tags.count("svg") == 4 + 2 + 1 and "Held-out" not in text and "without an engine" not in markdown
    report = states_report(measurements({"none": 1.0, "trained": 1.2}, repeats=1))
    report = report.model_copy(update={"calibration": {}, "heads": {}})
    (tmp_path / "states.json").write_text(report.model_dump_json())
    text = page.render_html(read_inputs(tmp_path))
    assert "<h2>Calibration" not in text and "<h2>Training" not in text and "One repeat cannot show" in text


def test_a_job_folder_is_searched(tmp_path: Path, undrawn: None) -> None:
    make(tmp_path)
    for name, place in (("curve.json", "train/a/logs/curve.json"), ("heads-details.json", "eval-details.json"),
                        ("states.json", "benchmark/states.json")):  # fmt: skip
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).rename(tmp_path / place)
    text = write_report(tmp_path)[0].read_text()
    assert "without an engine" in text
    curve = read_inputs(tmp_path).curve
    assert curve is not None and len(curve.held_out) == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("states.json", None, "has no states.json; make it with `eagle-plugin benchmark"),
        ("states.json", "{", "states.json is not JSON ("),
        ("states.json", '{"engine": "sglang"}', "engine_version: Field required; wanted the file of `eagle-plugin b"),
        ("curve.json", '{"held_out": 3}', "curve.json has held_out 3: Input should be a valid list"),
        ("heads-details.json", '{"a": {"gsm8k": {"chain4_t0": {"low": "x"}}}}', "heads-details.json has heads.a.gsm8k"),
    ],
)
def test_a_bad_input_is_one_sentence(
    name: str,
    content: str | None,
    message: str,
    tmp_path: Path,
    undrawn: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path)
    (tmp_path / "report.html").unlink()
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "report.html").exists()


def test_the_plain_file_of_an_evaluation_leads_to_its_details(tmp_path: Path, undrawn: None) -> None:
    make(tmp_path)
    (tmp_path / "heads.json").write_text('{"gsm8k": {"chain4_t0": 2.0}}')
    found = read_inputs(tmp_path, evaluation=tmp_path / "heads.json").evaluation
    assert found is not None and found["trained"]["gsm8k"]["tree16_t0"].low == 1.9


def test_a_given_file_must_be_there(tmp_path: Path, undrawn: None) -> None:
    make(tmp_path)
    with pytest.raises(ReportError, match="nowhere.json cannot be read"):
        write_report(tmp_path, curve=tmp_path / "nowhere.json")


def test_a_page_that_is_too_large_is_refused(tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setattr(page, "LARGEST", 1000)
    with pytest.raises(ReportError, match="wanted at most 1,000"):
        write_report(tmp_path)


def test_the_same_numbers_give_the_same_page(tmp_path: Path, whole: tuple[Page, str, str]) -> None:
    assert make(tmp_path)[1] == whole[1]


def test_series_differ_without_colour() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == len(set(MARKERS)) == len(MARKERS)
