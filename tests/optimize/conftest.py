"""A job's recipe, and stages that pretend, for tests of what a job does around its stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_worlds import PretendedStages, write_recipe


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> PretendedStages:
    return PretendedStages(monkeypatch)


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path) -> Path:
    return write_recipe(tmp_path / "recipe", tiny_target)
