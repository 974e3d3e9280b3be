"""benchmarks/targets.py: the table of docs/targets.md says what the rows say, and nothing else changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from family_models import CHANGES

from benchmarks import engine_tests
from benchmarks.engine_tests import END
from benchmarks.target_features import BEGIN as FEATURES_BEGIN
from benchmarks.target_features import FEATURES, Feature, FeatureRow, features_table, try_feature
from benchmarks.targets import BEGIN, KINDS, NAMES, ROOT, Row, served_table, write_document


def row(family: str, engine: str, head: str, served_by: str = "plugin", equal: bool | None = True) -> Row:
    return Row(family=family, engine=engine, head=head, served_by=served_by, greedy_equal=equal)


FOUND = FeatureRow(
    feature="a cache",
    engine="vllm",
    device="CPU",
    served_by="plugin",
    greedy_equal=True,
    passed=3,
    seconds=1,
    tests=["t"],
)
ROWS = [
    *(row("llama", engine, head) for engine in ("sglang", "vllm") for head in KINDS.values()),
    row("gemma3_text", "sglang", "EAGLE-3"),
    row("gemma3_text", "vllm", "EAGLE-3", "nobody", None),
    row("gemma3_text", "vllm", "EAGLE-2"),
    row("qwen3_next", "vllm", "EAGLE-3", "engine"),
    row("qwen2", "sglang", "EAGLE-3", equal=False),
    row("qwen2", "vllm", "EAGLE-3", "nobody", None),
]


def test_the_table_says_what_was_found() -> None:
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in served_table(ROWS).splitlines()[2:]}
    cells = {name: [part.strip(" |") for part in lines[f"| {title}"]] for name, title in NAMES.items()}
    assert cells["llama"] == ["EAGLE-3, P-EAGLE, EAGLE-2"] * 2
    assert cells["gemma3_text"] == ["EAGLE-3", "EAGLE-2"]
    assert cells["qwen3_next"] == ["not tried", "the engine's own worker"]
    assert cells["qwen2"] == ["**differs**", "does not start"]
    assert set(CHANGES) <= set(NAMES)


def test_only_the_table_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "targets.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n\n{END}\n\nbetween\n\n{FEATURES_BEGIN}{END}\n\nafter\n")
    write_document(page, ROWS, [FOUND])
    families = f"{BEGIN}\n{served_table(ROWS)}\n{END}\n"
    assert page.read_text() == (
        f"before\n\n{families}\nbetween\n\n{FEATURES_BEGIN}\n{features_table([FOUND])}\n{END}\n\nafter\n"
    )
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place for the table"):
        write_document(page, ROWS, [FOUND])
    assert page.read_text() == "no place"
    assert {BEGIN, FEATURES_BEGIN} <= set((ROOT / "docs/targets.md").read_text().splitlines(keepends=True))


def test_every_feature_names_tests_that_are_there() -> None:
    for feature in FEATURES:
        for test in feature.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), test
    assert len({(feature.name, feature.engine) for feature in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize(("body", "served"), [("assert True", "plugin"), ("assert False", "unknown")])
def test_a_feature_is_served_where_its_tests_pass(
    body: str, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of several fails, or none is found."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_made.py").write_text(f"def test_one():\n    pass\n\n\ndef test_two():\n    {body}\n")
    (tmp_path / ".venv-sglang").symlink_to(Path(sys.prefix))
    monkeypatch.setattr(engine_tests, "ROOT", tmp_path)
    made = try_feature(Feature("made", "sglang", ("test_made.py",)), tmp_path / "log")
    assert (made.served_by, made.greedy_equal) == (served, served == "plugin")
    none = try_feature(Feature("made", "sglang", ("test_none.py",)), tmp_path / "log")
    assert (none.served_by, none.passed) == ("unknown", 0)
