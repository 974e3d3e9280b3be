"""aiperf as a second load generator: its command line, its results, and what is wrong with either."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from states_reports import states_report

from eagle_plugin.bench.cells import Cell
from eagle_plugin.bench.closed_loop import Ask
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.states import aiperf
from eagle_plugin.bench.states.aiperf import AiperfError, body_of, command_of, find_aiperf, read_row
from eagle_plugin.bench.states.document import AiperfRow
from eagle_plugin.bench.states.table import aiperf_table
from eagle_plugin.learning.report.inputs import Inputs
from eagle_plugin.learning.report.page import render_html, render_markdown

CELL = Cell(4, 0.0, "gsm8k")
ROW = AiperfRow(state="trained", concurrency=4, prompts="gsm8k", requests=12, ttft_ms=32.6, tpot_ms=2.48, itl_ms=4.4,
                requests_per_s=8.25, tokens_per_s=251.7, otps=403.2)  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    """A result as aiperf 0.13 writes it, as far as it is read."""

    def metric(value: float) -> dict[str, float]:
        return {"avg": value, "p50": value, "p99": 2 * value}

    return {
        "request_count": {"unit": "requests", "avg": 12.0},
        "time_to_first_token": metric(ROW.ttft_ms),
        "inter_token_latency": metric(ROW.tpot_ms),
        "inter_chunk_latency": metric(ROW.itl_ms),
        "request_throughput": metric(ROW.requests_per_s),
        "output_token_throughput": metric(ROW.tokens_per_s),
        "output_token_throughput_per_user": metric(ROW.otps),
    } | changes


def test_a_result_becomes_a_row(tmp_path: Path) -> None:
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps(result()))
    assert read_row(path, "trained", CELL, 12) == ROW


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no result of aiperf"),
        ("{", "no result of aiperf"),
        (json.dumps(result(inter_token_latency=None)), "no result of aiperf"),
        (json.dumps(result(request_count={"avg": 11.0})), "11 of 12 requests were answered"),
        (json.dumps(result(time_to_first_token={"p50": float("nan")})), "requests were answered"),
    ],
)
def test_a_result_that_is_none_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(text)
    with pytest.raises(AiperfError, match=sentence):
        read_row(path, "trained", CELL, 12)


def test_the_program_is_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for named in ("", "nowhere/aiperf"):
        with pytest.raises(AiperfError, match="make env-aiperf"):
            find_aiperf(named)
    for place in ("bin/aiperf", ".venv-aiperf/bin/aiperf"):  # the second one comes first
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        assert find_aiperf("") == path == find_aiperf(str(path))


def test_it_is_asked_what_our_own_load_asks(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    question = Question(id="1", group="g", prompt="c", messages=turns)
    body = body_of(Ask(question, 48), "model", 0.7)
    assert (body["messages"], body["max_tokens"], body["temperature"]) == (turns, 48, 0.7)
    single = body_of(Ask(Question(id="2", group="g", prompt="d"), 48), "model", 0.0)
    assert single["messages"] == [{"role": "user", "content": "d"}] and single["stream"]
    command = command_of(Path("/bin/aiperf"), "http://127.0.0.1:1", "model", tmp_path, 4, 12, tmp_path / "out")
    assert command[command.index("--concurrency") + 1] == "4" and command[command.index("--request-count") + 1] == "12"


@pytest.mark.parametrize(
    ("script", "sentence"), [("echo 'no tokenizer' >&2; exit 3", "no tokenizer"), (None, "did not run")]
)
def test_a_program_that_fails_is_one_sentence(script: str | None, sentence: str, tmp_path: Path) -> None:
    program = tmp_path / "aiperf"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(AiperfError, match=sentence) as caught:
        aiperf._run([str(program)], [{"max_tokens": 1}], tmp_path / "run")
    assert "\n" not in str(caught.value) and json.loads((tmp_path / "run/bodies.jsonl").read_text()) == {
        "max_tokens": 1
    }


def test_the_rows_are_in_the_tables() -> None:
    report = states_report().model_copy(update={"aiperf": [ROW]})
    table = aiperf_table(report)
    assert [list(column.cells)[0] for column in table.columns][2:] == [
        "4",
        "33",
        "2.5",
        "4.4",
        "8.25",
        "251.7",
        "403.2",
    ]
    for render in (render_html, render_markdown):
        assert "The same load by aiperf" in render(Inputs(report, None, None))
        assert "aiperf" not in render(Inputs(states_report(), None, None))
