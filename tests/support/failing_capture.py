"""A plugin for the test server: the captures of our rounds raise, as a flag that nobody knows may let them."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from eagle_plugin.sglang import capture

    def fails(*arguments: Any) -> None:
        raise AssertionError("the graph pool has no id\nand a second line")

    capture.capture_rounds = fails
