"""What a command prints while it works: log lines in a file, a bar on a terminal."""

import io
import re
import time

from rich.console import Console

from eagle_plugin.bench.progress import Steps


def logged(silent_seconds: float = 60.0) -> tuple[Steps, io.StringIO]:
    sink = io.StringIO()
    return Steps(Console(file=sink, width=80), silent_seconds), sink


def test_a_line_per_step_and_per_tenth():
    steps, sink = logged()
    with steps.step("measuring") as step:
        for number in range(1, 101):
            step.update(f"answer {number}", number / 100)
    lines = sink.getvalue().splitlines()
    assert len(lines) == 11
    assert all(re.match(r"\[ +\d+ s\] measuring", line) for line in lines)
    assert lines[0].endswith("measuring") and lines[1].endswith("measuring: 10%, answer 10")
    assert lines[-1].endswith("measuring: 100%, answer 100")


def test_a_step_is_never_silent_for_long():
    steps, sink = logged(silent_seconds=0.3)
    with steps.step("starting") as step:
        step.update("server [a], 7 s")
        time.sleep(1.6)
    count = len(sink.getvalue().splitlines())
    assert 3 <= count <= 7
    assert sink.getvalue().splitlines()[-1].endswith("starting: server [a], 7 s")
    time.sleep(0.8)
    assert len(sink.getvalue().splitlines()) == count  # nothing after the step


def test_long_lines_are_not_broken():
    steps, sink = logged()
    steps.log("x" * 200)
    assert sink.getvalue().count("\n") == 1


def test_every_line_is_flushed():
    class Sink(io.StringIO):
        unflushed = 0

        def write(self, text: str) -> int:
            self.unflushed += len(text)
            return super().write(text)

        def flush(self) -> None:
            self.unflushed = 0

    sink = Sink()
    with Steps(Console(file=sink)).step("preparing") as step:
        step.update("half", 0.5)
        assert sink.unflushed == 0 and "50%" in sink.getvalue()


def test_a_terminal_gets_a_bar_that_disappears():
    sink = io.StringIO()
    steps = Steps(Console(file=sink, force_terminal=True, width=80), silent_seconds=0.1)
    with steps.step("measuring") as step:
        step.update("repeat 1", 0.5)
        time.sleep(0.5)
        steps.log("a line above the bar")
    text = sink.getvalue()
    assert "measuring: repeat 1" in text and "a line above the bar" in text
    assert "\x1b[2K" in text  # the bar's line is erased
