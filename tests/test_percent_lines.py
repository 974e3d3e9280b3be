"""Progress lines in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eagle_plugin.models.progress import progress_bar
from eagle_plugin.percent_lines import PercentLines


def test_a_line_at_the_start_and_at_every_further_tenth() -> None:
    log = io.StringIO()
    lines = PercentLines(Console(file=log, width=20))
    for done in range(31):
        lines("features [of a head]", done / 30)
    lines("trees", 0.55)
    written = log.getvalue().splitlines()
    assert written[:-1] == [f"features [of a head]: {percent}%" for percent in range(0, 101, 10)]
    assert written[-1] == "trees: 55%"


def test_commands_write_lines_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        for done in range(101):
            progress("answers", done / 100)
    assert capsys.readouterr().err.splitlines() == [f"answers: {percent}%" for percent in range(0, 101, 10)]
