"""A writer of captures in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.learning.data.privacy.filter import PrivacyFilter, PrivacySettings
from eagle_plugin.learning.data.traffic.segments import SegmentWriter
from eagle_plugin.learning.data.traffic.writer import TrafficWriter
from eagle_plugin.traffic.frames import Exchange

LIMIT = 10**8


@pytest.fixture(scope="session")
def filters() -> Callable[[str], PrivacyFilter]:
    """A filter by mode; each is made once."""
    made: dict[str, PrivacyFilter] = {}

    def make(mode: str) -> PrivacyFilter:
        return made.setdefault(mode, PrivacyFilter(PrivacySettings(mode)))

    return make


@pytest.fixture
def write(tmp_path: Path, filters: Callable[[str], PrivacyFilter]) -> Callable[..., list[dict[str, Any]]]:
    """A function that writes exchanges to tmp_path / mode and returns the records that are there then."""

    def run(*exchanges: Exchange, mode: str = "drop", private: PrivacyFilter | None = None) -> list[dict[str, Any]]:
        folder = tmp_path / mode
        run.writer = writer = TrafficWriter(private or filters(mode), SegmentWriter(folder, LIMIT))
        for one in exchanges:
            writer.write(one)
        writer._tell()
        return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.open()]

    return run
