"""What a sentence shows of a value that somebody's file has."""

from __future__ import annotations

from eagle_plugin.common.errors import UserError


def test_the_beginning_of_a_long_value_is_shown() -> None:
    folder = "/".join(["a" * 255] * 8)
    assert str(UserError(f"{folder} has vocab_size '{'x' * 5000}', wanted a number")) == (
        f"{folder} has vocab_size '{'x' * 59}... wanted a number"
    )
