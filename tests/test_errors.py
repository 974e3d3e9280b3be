"""What a sentence shows of a value that somebody's file has."""

from __future__ import annotations

from eagle_plugin.common.errors import UserError


def test_the_beginning_of_a_long_value_is_shown() -> None:
    folder = "/".join(["a" * 255] * 8)
    assert str(UserError(f"{folder} has vocab_size '{'x' * 5000}', wanted a number")) == (
        f"{folder} has vocab_size '{'x' * 59}... wanted a number"
    )


def test_values_with_ends_of_lines_leave_a_sentence_one_line() -> None:
    assert str(UserError("config.json has architectures ['\n\r\x1b[2J\u2028'], wanted a name")) == (
        "config.json has architectures [' [2J '], wanted a name"
    )


def test_the_beginning_and_the_end_of_a_long_sentence_are_shown() -> None:
    line = str(UserError(f"config.json has {[0] * 5000}, wanted a name; write one"))
    assert len(line) < 4000 and line.startswith("config.json has [0, 0") and line.endswith("wanted a name; write one")
