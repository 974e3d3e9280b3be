"""What a self-test found is kept once per device, versions, sources and shape; and the command that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin import cli
from eagle_plugin.common.atomic_io import WriteError
from eagle_plugin.selftest import command, record, suite
from eagle_plugin.selftest.suite import Finding, Report

SHAPE = {"heads": 4, "tree": [2, 4, 8]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records."""
    # Not by EAGLE_CACHE_DIR: the native library would be built there anew.
    monkeypatch.setattr(record, "folder", lambda: tmp_path / "cache" / "selftest")
    return tmp_path / "cache" / "selftest"


def test_the_folder_is_beside_the_built_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path))
    assert record.folder() == tmp_path / "selftest"


def key(**changes: Any) -> dict[str, Any]:
    return record.key_of("kernels", "cpu", SHAPE, "sglang 0.5.23") | changes


def test_a_result_is_kept() -> None:
    assert record.read(key()) is None
    written = record.write(key(), ["verify_tree: wrong"], 3.5)
    assert record.read(key()) == written and not written.passed and written.reasons == ["verify_tree: wrong"]
    assert record.write(key(), [], 1.0).passed and record.read(key()).reasons == []


def test_those_of_other_sources_are_not_listed() -> None:
    record.write(key(sources="another"), ["verify_tree: wrong"], 1.0)
    assert record.kept() == []
    written = record.write(key(), [], 1.0)
    record.folder().joinpath("cut.json").write_text("{")
    assert record.kept() == [written]


@pytest.mark.parametrize(
    "name", ["part", "device", "driver", "torch", "libraries", "plugin", "sources", "engine", "shape"]
)
def test_a_result_belongs_to_one_key(name: str) -> None:
    record.write(key(), [], 1.0)
    assert name in key() and record.read(key(**{name: "another"})) is None


def test_every_room_whose_sources_count_has_some() -> None:
    """Otherwise a changed adapter would be served on what its old sources passed."""
    assert all([*(record.loader.PACKAGE / room).glob("*.py")] for room in record.SOURCES)
    assert {"runtime", "sglang", "vllm"} <= set(record.SOURCES)


def test_the_key_knows_the_sources_and_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = record.sources_digest("cpu")
    assert record.sources_digest("cpu") == before
    monkeypatch.setenv("EAGLE_LIBRARY", str(tmp_path / "own.so"))
    (tmp_path / "own.so").write_bytes(b"one build")
    one = record.sources_digest("cpu")
    (tmp_path / "own.so").write_bytes(b"another build")
    assert len({before, one, record.sources_digest("cpu")}) == 3
    monkeypatch.delenv("EAGLE_LIBRARY")
    monkeypatch.setattr(record, "_python_digest", lambda: "another source")
    assert record.sources_digest("cpu") != before


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "[" * 5000, '{"version": 1}', '{"version": 2, "key": {}, "reasons": [], "seconds": 1}',
        "another key", "reasons", "seconds", "captured",
    ],
)  # fmt: skip
def test_a_damaged_record_counts_as_none(damage: str, cache: Path) -> None:
    record.write(key(), [], 1.0)
    (path,) = cache.iterdir()
    kept = json.loads(path.read_text())
    changed = {
        "another key": kept | {"key": key(torch="0.0")},
        "reasons": kept | {"reasons": "none"},
        "seconds": kept | {"seconds": None},
        "captured": kept | {"captured": [16]},
    }
    path.write_text(json.dumps(changed[damage]) if damage in changed else damage)
    assert record.read(key()) is None
    path.write_bytes(b"\xff\xfe")
    assert record.read(key()) is None


def test_all_records_are_forgotten(cache: Path) -> None:
    assert record.forget() == 0
    record.write(key(), ["wrong"], 1.0)
    record.write(key(part="round"), [], 1.0)
    assert record.forget() == 2 and not list(cache.iterdir())


def test_a_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.parent.write_text("a file")
    for call in (record.check_writable, lambda: record.write(key(), [], 1.0)):
        with pytest.raises(WriteError, match="cannot write .*/cache/selftest/.*; set EAGLE_CACHE_DIR to a folder"):
            call()
    assert record.read(key()) is None


@pytest.mark.parametrize("found", [[], ["log p: 3 of 8 values differ"]])
def test_the_command(found: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []

    def run(*arguments: Any) -> Report:
        runs.append(arguments)
        return Report([Finding("propose", found, 8, 0.5, 0.1), Finding("uniforms", [], 3, 0.0, 0.2)])

    monkeypatch.setattr(suite, "run", run)
    code = 1 if found else 0
    call = ["selftest", "--device", "cpu", "--model-shape", "heads=8"]
    assert cli.main(call) == code
    shown = capsys.readouterr()
    assert "propose" in shown.out and "50% of what is allowed" in shown.out and "uniforms" in shown.out
    if found:
        assert shown.err.strip().startswith("the self-test failed on cpu")
        assert shown.err.strip().endswith("propose: log p: 3 of 8 values differ")
    else:
        assert not shown.err
    # The second time the record answers, until --again removes it.
    assert cli.main(call) == code and len(runs) == 1
    assert ("failed" if found else "passed") + " on 20" in capsys.readouterr().out
    assert cli.main([*call, "--json"]) == code and len(runs) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is not bool(found) and told["from_record"] and told["key"]["shape"]["heads"] == 8
    record.write(key(), ["of a server"], 1.0)
    assert cli.main([*call, "--again", "--json"]) == code and len(runs) == 2
    told = json.loads(capsys.readouterr().out)
    assert not told["from_record"] and [check["check"] for check in told["checks"]] == ["propose", "uniforms"]
    assert record.read(key()) is None
    assert cli.main(["selftest", "--device", "cpu"]) == code and len(runs) == 3  # another shape


@pytest.mark.parametrize("differences", [[], ["log p: 3 of 8 values differ"]])
def test_the_command_without_memory(
    differences: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference counts; else nothing is known, and nothing is kept."""
    findings = [
        Finding("propose", [], 0, 0.0, 0.1, ran_out=True),
        Finding("uniforms", differences, 8, 0.0, 0.2),
    ]
    monkeypatch.setattr(suite, "run", lambda *_: Report(findings))
    assert cli.main(["selftest", "--device", "cpu"]) == (1 if differences else 2)
    shown = capsys.readouterr()
    kept = list(record.folder().glob("*.json"))
    if differences:
        assert "no memory was left" in shown.out and len(kept) == 1
    else:
        assert "is not complete on cpu" in shown.err and "propose: no memory was left" in shown.err and not kept


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
        (["--model-shape", "heads=none"], "--model-shape heads is 'none'"),
    ],
)
def test_a_wrong_call_is_one_sentence(call: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", *call]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and wanted in line


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "heads=32, kv_heads=8" in shown and "EAGLE_CACHE_DIR" in shown and "--again" in shown
