"""`eagle-plugin eval` from its arguments to the table and the files, on a Markov target with heads of known quality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from tiny_targets import write_target

from eagle_plugin.common.errors import UserError
from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.export import save_head
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row
from eagle_plugin.learning.evaluate.eval_command import main

PROMPTS = [[0, 40, 41, 99], [0, 120, 77, 5, 60], [0, 200, 9], [0, 33, 34, 35]]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    made = [TokenRow(str(i), "chat" if i % 2 else "code", ids, [], "", "val") for i, ids in enumerate(PROMPTS)]
    file.write_text("".join(map(format_row, made)))
    return file


def test_two_heads_in_one_table(
    rows: Path, markov_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head that is always right accepts everything, one that is wrong after 40 % of the tokens does not."""
    poor = tiny_models.markov_eagle2_head(tmp_path / "poor", markov_target, wrong=0.4)
    good = tiny_models.markov_eagle3_head(tmp_path / "good", markov_target)
    out = tmp_path / "out" / "heads.json"
    args = [str(markov_target), str(poor), str(good), "--rows", str(rows), "--tokens", "24", "--json", str(out)]
    assert main(args) == 0
    plain = json.loads(out.read_text())
    assert set(plain) == {"chat", "code"}
    for numbers in plain.values():  # of the last head
        assert numbers == {name: pytest.approx(5.0, abs=0.05) for name in numbers}
        assert set(numbers) == {"chain4_t0", "tree16_t0", "chain4_t1", "tree16_t1"}
    details = json.loads((tmp_path / "out" / "heads-details.json").read_text())
    assert set(details) == {"poor", "good"} and set(details["poor"]) == {"chat", "code", "all"}
    weak = details["poor"]["all"]["chain4_t0"]
    assert 1.5 < weak["low"] < weak["accept_length"] < weak["high"] < 4.5
    assert weak["cumulative"][0] > weak["cumulative"][3] and weak["prompts"] == 4
    table, log = capsys.readouterr()
    assert "100%" in log
    assert "gain of the tree" in table and "+" in table and "all" in table

    deep = tmp_path / "deep.json"
    assert main([*args[:5], "--tokens", "24", "--steps", "7", "--json", str(deep)]) == 0
    for numbers in json.loads(deep.read_text()).values():
        assert numbers == {name: pytest.approx(8.0, abs=0.1) for name in numbers}
        assert set(numbers) == {"chain7_t0", "tree16_t0", "chain7_t1", "tree16_t1"}
    assert "chain of 7" in capsys.readouterr().out

    assert main([*args[:2], "--rows", str(rows), "--tokens", "24", "--temperatures", "0"]) == 0
    table = capsys.readouterr().out
    assert "k-th draft accepted" in table and "gain" not in table


@pytest.mark.parametrize(("family", "reads_trees"), [("gpt_oss", True), ("mistral", True), ("qwen3_next", False)])
def test_targets_with_windows_and_recurrent_layers(
    family: str, reads_trees: bool, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's stage gives no temperatures: what cannot be measured must not lose what can."""
    target, head, out = (
        write_target(tmp_path / "target", family, vocab_size=256),
        tmp_path / "head",
        tmp_path / "e.json",
    )
    save_head(new_head("eagle3", target), head, target_dir=target)
    args = [str(target), str(head), "--rows", str(rows), "--tokens", "24", "--dtype", "float32", "--json", str(out)]
    assert main(args) == 0
    at_0, at_1 = {"chain4_t0", "tree16_t0"}, {"chain4_t1", "tree16_t1"}
    assert set(json.loads(out.read_text())["chat"]) == (at_0 | at_1 if reads_trees else at_0)
    table, log = capsys.readouterr()
    assert "accept length" in table
    assert ("not measured at temperature 1: Qwen3NextForCausalLM cannot read a draft tree" in log) is not reads_trees
    if not reads_trees:
        with pytest.raises(DataError, match="temperature 0 reads no trees"):
            main([*args, "--temperatures", "1"])


def test_responses_that_are_too_short(rows: Path, markov_target: Path, markov_eagle3: Path, capsys: object) -> None:
    args = [str(markov_target), str(markov_eagle3), "--rows", str(rows), "--tokens", "3", "--temperatures", "0"]
    assert main(args) == 0
    assert capsys.readouterr().out.count("responses too short") == 3  # type: ignore[attr-defined]


def test_refusals(markov_target: Path, tiny_eagle3: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a folder nor a model of .* \(smollm2-135m-instruct, ...\)"):
        main(["nowhere", str(tiny_eagle3)])
    with pytest.raises(UserError, match="use a head that was trained for this target"):
        main([str(markov_target), str(tiny_eagle3), "--rows", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit):
        main([str(markov_target), str(tiny_eagle3), "--temperatures", "-1"])
    with pytest.raises(SystemExit):
        main([str(markov_target), str(tiny_eagle3), "--steps", "1"])
