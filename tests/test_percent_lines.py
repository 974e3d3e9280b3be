"""Progress lines in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.progress import TextColumn

from eagle_plugin.common.progress import PercentLines, ProgressBars, progress_bar


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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_bars_are_lines_in_a_log(is_terminal: bool) -> None:
    """The values of the task's own fields, and the time that is left, are in the line."""
    log, clock = io.StringIO(), iter(range(1000))
    console = Console(file=log, width=60, force_terminal=is_terminal, color_system=None)
    with ProgressBars(TextColumn("{task.description}"), console=console) as bars:
        bars.get_time = lambda: float(next(clock))
        task = bars.add_task("features", total=40, rate="5 tokens/s", rows=0)
        hidden = bars.add_task("checking", total=4, visible=False)
        unknown = bars.add_task("reading", total=None)
        for done in range(1, 41):
            bars.update(task, advance=1, rows=1000 * done)
            bars.advance(hidden, 0.1)
            bars.advance(unknown)
    lines = log.getvalue().splitlines()
    if is_terminal:
        assert "features" in log.getvalue() and "%" not in log.getvalue()  # drawn by rich, with the columns given
        return
    assert len(lines) == 11 and all(line.startswith("features: ") for line in lines)
    assert lines[0] == "features: 2%, 5 tokens/s, 1,000 rows"
    assert re.fullmatch(r"features: 50%, 5 tokens/s, 20,000 rows, 0:\d\d:\d\d left", lines[5])
    assert lines[-1] == "features: 100%, 5 tokens/s, 40,000 rows"


def test_two_tasks_of_one_name_have_lines_of_their_own() -> None:
    log = io.StringIO()
    with ProgressBars(console=Console(file=log)) as bars:
        for _ in range(2):
            bars.advance(bars.add_task("reading", total=1))
    assert log.getvalue().splitlines() == ["reading: 100%"] * 2


def test_bars_that_are_not_shown_write_nothing() -> None:
    log = io.StringIO()
    with ProgressBars(console=Console(file=log), shown=False) as bars:
        bars.advance(bars.add_task("features", total=1))
    assert not log.getvalue()
