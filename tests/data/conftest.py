"""Fixtures of the data tests: a writer of files, and one scanner, because its recognisers take seconds to import."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.learning.data.privacy.scanner import Scanner


@pytest.fixture(scope="session")
def scanner() -> Scanner:
    return Scanner()


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """A function that writes objects as JSON lines and returns the name of the file."""

    def write(*objects: Any, name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(value) + "\n" for value in objects))
        return str(path)

    return write
