"""The settings of a capture: what is refused at the start of a server, each with one sentence."""

from __future__ import annotations

import sys

import pytest

from eagle_plugin.traffic.settings import CaptureError, CaptureSettings, capture_settings


def test_without_a_folder_nothing_is_captured() -> None:
    assert capture_settings({}) is capture_settings({"EAGLE_CAPTURE": "", "EAGLE_POLICY": "fixed"}) is None


def test_all_settings_are_read_and_reach_the_writer() -> None:
    given = {"RATE": "0.25", "LIMIT": "2GiB", "PRIVACY": "redact", "PHONE_REGIONS": "US", "RECOGNISER": "a:b"}
    given |= {"TOKENIZER": "/t", "PYTHON": sys.executable}
    settings = capture_settings({"EAGLE_CAPTURE": "/c"} | {f"EAGLE_CAPTURE_{name}": one for name, one in given.items()})
    assert settings == CaptureSettings("/c", 0.25, 2 << 30, "redact", "a:b", "US", "/t", sys.executable)
    assert CaptureSettings.from_json(settings.to_json()) == settings
    assert capture_settings({"EAGLE_CAPTURE": "/c"}) == CaptureSettings("/c")


@pytest.mark.parametrize(("text", "limit"), [("500MB", 500 * 10**6), ("1.5 gb", 1_500_000_000), ("2000000", 2_000_000)])
def test_sizes(text: str, limit: int) -> None:
    assert capture_settings({"EAGLE_CAPTURE": "/c", "EAGLE_CAPTURE_LIMIT": text}).limit == limit


@pytest.mark.parametrize(
    ("name", "value", "answered"),
    [
        ("EAGLE_CAPTURE", "relative/folder", "EAGLE_CAPTURE is relative/folder, wanted a folder from the root on"),
        ("EAGLE_CAPTURE_RATE", "2", "EAGLE_CAPTURE_RATE is 2, wanted the share"),
        ("EAGLE_CAPTURE_RATE", "0", "EAGLE_CAPTURE_RATE is 0, wanted the share"),
        ("EAGLE_CAPTURE_RATE", "nan", "EAGLE_CAPTURE_RATE is nan, wanted the share"),
        ("EAGLE_CAPTURE_LIMIT", "10 apples", "EAGLE_CAPTURE_LIMIT is 10 apples, wanted a size of 1MB or more"),
        ("EAGLE_CAPTURE_LIMIT", "10KB", "EAGLE_CAPTURE_LIMIT is 10KB, wanted a size of 1MB or more"),
        ("EAGLE_CAPTURE_PRIVACY", "off", "EAGLE_CAPTURE_PRIVACY is off, wanted drop or redact: nothing is written"),
        ("EAGLE_CAPTURE_PYTHON", "/no/python", "EAGLE_CAPTURE_PYTHON is /no/python, wanted the path of a Python"),
        (
            "EAGLE_CAPTURE_RATES",
            "1",
            "EAGLE_CAPTURE_RATES is not a setting of the capture, wanted one of",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, value: str, answered: str) -> None:
    with pytest.raises(CaptureError, match=answered):
        capture_settings({"EAGLE_CAPTURE": "/c"} | {name: value})
