"""The document of the demo: its fields, what it refuses, that it is written atomically; and the table."""

import io
import json
import os

import pytest
from demo_reports import demo_report, series
from pydantic import ValidationError
from rich.console import Console

from eagle_plugin.bench.outputs import write_json
from eagle_plugin.bench.report import DemoReport, speculative_stats
from eagle_plugin.bench.table import demo_table, verdict_sentence

CONTRACT = [
    "engine", "engine_version", "target", "head", "prompts", "greedy_equal", "plain", "builtin", "plugin",
    "speedup_vs_plain", "speedup_vs_builtin",
]  # fmt: skip


@pytest.fixture
def report() -> DemoReport:
    return demo_report()


def test_the_contract_comes_first_and_is_complete(report, tmp_path):
    path = tmp_path / "out" / "demo.json"
    write_json(report, path)
    document = json.loads(path.read_text())
    assert list(document)[: len(CONTRACT)] == CONTRACT
    assert set(document["plain"]) == {"tokens_per_s", "tpot_ms", "ttft_ms"}
    for worker in ("builtin", "plugin"):
        assert set(document[worker]) == {"tokens_per_s", "tpot_ms", "ttft_ms", "accept_length"}
    assert document["plain"] == {"tokens_per_s": 32.5, "tpot_ms": 29.69, "ttft_ms": 100.0}
    assert document["plugin"]["accept_length"] == 2.0
    assert DemoReport.model_validate(document) == report
    assert os.uname().nodename not in json.dumps(document["machine"]).split('"')


@pytest.mark.parametrize("key", [*CONTRACT, "settings", "machine", "date"])
def test_a_missing_field_is_refused(report, key):
    document = report.model_dump()
    del document[key]
    with pytest.raises(ValidationError, match=key):
        DemoReport.model_validate(document)


def test_an_unknown_field_or_an_impossible_accept_length_is_refused(report):
    with pytest.raises(ValidationError, match="surplus"):
        DemoReport.model_validate(report.model_dump() | {"surplus": 1})
    with pytest.raises(ValidationError, match="accept_length"):
        DemoReport.model_validate(
            report.model_dump() | {"plugin": {**report.plugin.model_dump(), "accept_length": 0.9}}
        )


def test_speculative_stats_need_verify_rounds():
    with pytest.raises(ValueError, match="builtin: the engine reported no verify round"):
        speculative_stats(series(1.0, None), "builtin")


def test_a_failed_write_leaves_the_old_document(report, tmp_path, monkeypatch):
    path = tmp_path / "demo.json"
    write_json(report, path)
    before = path.read_text()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(report, path)
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo.json"]


def test_the_table_shows_every_result_in_80_columns(report):
    sink = io.StringIO()
    Console(width=80, file=sink).print(demo_table(report))
    text = sink.getvalue()
    numbers = ["32.5 [", "34.2 [", "52.0 [", "1.60x [", "1.05x [", "1.52x [", "2/3", "1/3", "2.00", "1.60"]
    for number in [*numbers, "2/4/8", "2/1/3", "against engine", "[quartiles]"]:
        assert number in text, number
    assert verdict_sentence(report).endswith("; 3 of 3 greedy texts in fp32 are those of plain decoding")
