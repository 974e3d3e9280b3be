"""`eagle-plugin data render`: a file without a recorded answer is an error, not an empty file of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_plugin.data.render import main
from eagle_plugin.data.rows import DataError, read_rows

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
