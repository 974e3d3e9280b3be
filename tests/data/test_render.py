"""`eagle-plugin data render`: which recorded answers become rows, and with which end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_plugin.learning.data.prepare import main as prepare
from eagle_plugin.learning.data.render import main
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.target_files import stop_token_ids
from eagle_plugin.models import get_model

QUESTION = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "The air scatters blue light more than red light."}


def test_no_recorded_answer_is_an_error(tiny_target: Path, write_lines: Callable[..., str], tmp_path: Path) -> None:
    asked = {"id": "a", "source": "s", "messages": [QUESTION]}
    answered = {"id": "b", "source": "s", "messages": [QUESTION, ANSWER]}
    command = ["--target", str(tiny_target), "--out", str(tmp_path / "rows.jsonl")]
    with pytest.raises(DataError, match="gives no row: 2 no recorded answer; prepare it with --keep-responses"):
        main([write_lines(asked, {**asked, "id": "c"}), *command])
    assert not (tmp_path / "rows.jsonl").exists()
    assert main([write_lines(asked, answered), *command]) == 0
    assert [row.id for row in read_rows(tmp_path / "rows.jsonl")] == ["b#0"]


def test_captured_answers_that_were_cut_have_no_stop_token(write_lines: Callable[..., str], tmp_path: Path) -> None:
    """From the capture to the rows: the same answer with both finish reasons differs by the ending only."""
    target, rows = get_model("smollm2-135m-instruct"), {}
    for finish in ("stop", "length"):
        response = {"finish_reason": finish, "text": ANSWER["content"], "message": ANSWER}
        capture = write_lines({"v": 1, "id": "a", "request": {"messages": [QUESTION]}, "response": response})
        kept, out = tmp_path / "kept.jsonl", tmp_path / "rows.jsonl"
        assert prepare([capture, "--keep-responses", "--privacy", "off", "--out", str(kept)]) == 0
        assert main([str(kept), "--target", str(target), "--out", str(out)]) == 0
        (rows[finish],) = read_rows(out)
    cut, whole = rows["length"], rows["stop"]
    assert cut.prompt_ids == whole.prompt_ids and cut.id == whole.id
    assert whole.response_ids[:-1] == cut.response_ids and whole.response_ids[-1] in stop_token_ids(target)
    assert (whole.finish, cut.finish) == ("recorded", "length")
