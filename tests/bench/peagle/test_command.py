"""The whole benchmark against servers that answer with a known speed, and the preparation of the heads."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import peagle
from benchmarks.peagle import PreparedHead, prepare_head
from eagle_plugin.bench import measurement, preparation, steal
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import trained_depths

PEER = Path(__file__).parents[2] / "support/peer.py"


@pytest.fixture
def arguments(any_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a run whose servers are peers, on a machine without steal."""

    def launch(spec: ServerSpec, port: int) -> list[str]:
        return [sys.executable, str(PEER), str(port), "--gap", "0.003"]

    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], command=launch))
    monkeypatch.setattr(steal.StealWatch.__init__, "__defaults__", (lambda text: None, 0.05, lambda: steal.Ticks(1, 0)))
    monkeypatch.setattr(preparation, "busy_percent", lambda: 0.0)
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    flags = ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"), "--out", str(tmp_path / "out")]
    return [*flags, "--quick", "--concurrency", "1", "--forms", "chain", "--prompts", "chat", "--repeats", "2"]


def prepare(target: Path, given: str, copy: Path, levels: int) -> PreparedHead:
    """A head that no peer reads."""
    assert levels == 11 and given == peagle.SHIPPED
    return PreparedHead(target, "shipped", 11)


def run(options: list[str]) -> int:
    with mock.patch.object(peagle, "prepare_head", prepare):
        return peagle.main(options)


def test_a_run_writes_table_report_and_resumes(arguments, tmp_path, monkeypatch, capsys):
    asked: list[str] = []

    def counted(server, phases, temperature, real=measurement.run_load):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(server.label)
        # What the plugin's worker would write while it drafts: 2 ms per round and level.
        loaded = real(server, phases, temperature)
        levels = {"3": 3, "11": 11}.get(server.label.rpartition("-")[2], 0)
        return loaded._replace(drafts=loaded.drafts.plus(0.002 * levels) if levels else loaded.drafts)

    with monkeypatch.context() as broken:
        broken.setattr(measurement, "run_load", counted)
        assert run(arguments) == 130
        partial = tmp_path / "out/peagle.measured.json"
        before = json.loads(partial.read_text())["measurements"]
        assert len(before) == 3 and not (tmp_path / "out/peagle.json").exists()
        asked[:] = ["not interrupted"] * 4
        assert run([*arguments, "--resume", "--ks", "3", "11", "--threads", "7"]) == 2
        assert "was measured with threads" in capsys.readouterr().out
        assert run([*arguments, "--resume"]) == 0
    document = json.loads((tmp_path / "out/peagle.json").read_text())
    assert document["measurements"][:3] == before and len(document["measurements"]) == 2 * 5
    assert not partial.exists() and (tmp_path / "out/peagle.png").stat().st_size > 10_000
    assert document["draft_time_ratio_k11_over_k3"] == pytest.approx(11 / 3, abs=0.001)
    assert (document["peagle_head"], document["peagle_trained_levels"]) == ("shipped", 11)
    rows = {(row["kind"], row["k"]): row for row in document["rows"]}
    assert list(rows) == [("plain", 0), ("eagle3", 3), ("eagle3", 11), ("peagle", 3), ("peagle", 11)]
    ours = rows["peagle", 11]
    assert ours["draft_ms"] == 22.0 and ours["memory_mib"] > 5 and ours["steal"] == 0.0
    assert 0 < ours["tokens_per_s"] < 1 / 0.003 and ours["accept_length"] > 1 and ours["ratio_vs_eagle3"] > 0
    assert rows["plain", 0]["draft_ms"] is None and rows["plain", 0]["accept_length"] is None
    text = capsys.readouterr().out
    assert "not below 1.3" in text


def test_a_folder_that_cannot_be_written_ends_the_run_before_a_server_starts(arguments, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run([*arguments, "--out", str(tmp_path / "file/out")]) == 2
    assert "cannot write" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_missing_head_is_one_sentence(arguments, tmp_path, capsys):
    assert peagle.main([*arguments, "--peagle-head", str(tmp_path / "none")]) == 2
    text = capsys.readouterr().out
    assert text.count("there is no P-EAGLE head in") == 1 and "Traceback" not in text
    assert not (tmp_path / "out").exists()


def test_a_head_of_fewer_levels_is_copied_without_its_record(markov_target, markov_peagle, tmp_path):
    head, copy = tmp_path / "head", tmp_path / "copy"
    save_head(load_any_head(markov_peagle, markov_target), head, target_dir=markov_target)
    # nothing says how many levels it has
    assert prepare_head(markov_target, head, copy, 11) == (head, "head", None) and not copy.exists()
    path = head / "eagle_plugin.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"training": {"recipe": {"phases": [{"steps": 5}]}}}))
    assert trained_depths(head) == 5
    for levels, folder in ((5, head), (11, copy)):
        assert prepare_head(markov_target, head, copy, levels) == (folder, "head", 5)
    assert trained_depths(copy) is None


def test_an_eagle3_head_is_no_peagle_head(markov_target, markov_eagle3, tmp_path):
    with pytest.raises(HeadError, match="is a head of kind eagle3, wanted peagle"):
        prepare_head(markov_target, markov_eagle3, tmp_path / "copy", 3)
