"""The helpers of the contract tests find code, and neither comments nor strings that look like it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_signatures import assigned, assignments, calls, holds, in_order, returned


class Engine:
    def step(self, batch):
        """Calls self.update(batch) and returns batch, self.found."""
        # self.update(batch)
        self.found = self.read(
            batch,  # with a comment inside
        )
        if batch is not None:
            self.later: list = [batch]
        return self.found, len("self.update(batch)")

    def ordered(self, x):
        # self.third(x)
        self.first(x)
        self.second(x)
        self.third(x)
        self.first(x)


def test_what_is_there_is_found() -> None:
    assert holds(Engine.step, "self.read(batch)") and holds(Engine, "batch is not None")
    assert holds(Engine.step, "self.found = self.read(batch)")
    assert calls(Engine, "self.read") == ["self.read(batch)"]
    assert assignments(Engine.step, "self.found") == ["self.read(batch)"]
    assert assignments(Engine.step, "self.later") == ["[batch]"]
    assert assigned(Engine) == {"found", "later"}
    assert returned(Engine.step) == ["(self.found, len('self.update(batch)'))"]
    assert in_order(Engine.ordered, ["self.first", "self.second", "self.third"])


def test_comments_and_strings_are_not() -> None:
    assert not holds(Engine.step, "self.update(batch)") and not holds(Engine.step, "self.update")
    assert calls(Engine, "self.update") == [] and assignments(Engine, "self.update") == []
    assert not any("update(" in call for call in calls(Engine.step, "read"))
    assert not in_order(Engine.ordered, ["self.third", "self.first"])
    assert not in_order(Engine.ordered, ["self.first", "self.fourth"])


@pytest.mark.parametrize("pattern", ["self.read(other)", "self.read", "self.found"])
def test_a_part_or_another_argument_is_told_apart(pattern: str) -> None:
    expected = {"self.read(other)": False, "self.read": True, "self.found": True}  # self.found is also returned
    assert holds(Engine.step, pattern) == expected[pattern]
    assert not holds(Engine.ordered, pattern)


def test_what_has_no_source_is_an_error() -> None:
    with pytest.raises(TypeError):
        holds(SimpleNamespace(), "x")
