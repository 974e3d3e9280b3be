"""Which releases of an engine the plugin registers with, and what it says where it does not."""

from __future__ import annotations

import logging
import os

import pytest

from eagle_plugin.runtime.startup import may_serve

TESTED = ("1.0.0", "1.1.0")
logger = logging.getLogger("eagle_plugin")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the variables of the test's process."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "EAGLE_PLUGIN" not in k})


def nothing() -> list[str]:
    return []


def not_asked() -> list[str]:
    raise AssertionError("the source of a tested release was looked at")


@pytest.mark.parametrize("value", [None, "1", "force", "off"])
@pytest.mark.parametrize("version", ["1.0.0", "1.1.0+cpu"])
def test_a_tested_release(value: str | None, version: str, caplog: pytest.LogCaptureFixture) -> None:
    if value is not None:
        os.environ["EAGLE_PLUGIN"] = value
    assert may_serve("Engine", version, TESTED, logger, not_asked)
    unknown = ["eagle-plugin: EAGLE_PLUGIN is 'off', wanted one of 1, 0, force; taken as 1"]
    assert caplog.messages == (unknown if value == "off" else [])


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_switched_off(version: str) -> None:
    os.environ["EAGLE_PLUGIN"] = "0"
    assert not may_serve("Engine", version, TESTED, logger, not_asked)


def test_an_unknown_release_is_left_untouched(caplog: pytest.LogCaptureFixture) -> None:
    assert not may_serve("Engine", "2.0.0", TESTED, logger, not_asked)
    (line,) = caplog.messages
    assert "leaves Engine 2.0.0 untouched: it was tested with Engine 1.0.0, 1.1.0 only" in line
    assert "EAGLE_PLUGIN=force" in line


def test_forced(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["EAGLE_PLUGIN"] = "force"
    assert may_serve("Engine", "2.0.0", TESTED, logger, nothing)
    (line,) = caplog.messages
    assert "serves Engine 2.0.0, with which it was not tested, because EAGLE_PLUGIN=force" in line
    # A process that this one starts neither looks nor warns again; another engine is looked at.
    assert may_serve("Engine", "2.0.0", TESTED, logger, not_asked) and len(caplog.messages) == 1
    assert may_serve("Other", "2.0.0", TESTED, logger, nothing) and len(caplog.messages) == 2


def test_forced_and_a_name_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["EAGLE_PLUGIN"] = "force"
    assert not may_serve("Engine", "2.0.0", TESTED, logger, lambda: ["engine.a is gone", "engine.b is gone"])
    (line,) = caplog.messages
    assert "leaves Engine 2.0.0 untouched although EAGLE_PLUGIN=force: engine.a is gone (and 1 more)" in line
    assert "install Engine 1.0.0 or 1.1.0 or a newer eagle-plugin" in line
    assert not may_serve("Engine", "2.0.0", TESTED, logger, not_asked) and len(caplog.messages) == 1


@pytest.mark.parametrize("error", [SyntaxError("invalid syntax"), ModuleNotFoundError("no package"), OSError("gone")])
def test_forced_and_the_source_cannot_be_read(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def check() -> list[str]:
        raise error

    os.environ["EAGLE_PLUGIN"] = "force"
    assert not may_serve("Engine", "2.0.0", TESTED, logger, check)
    assert f"its source cannot be read: {error}" in caplog.text
