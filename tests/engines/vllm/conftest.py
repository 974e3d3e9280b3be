"""A target and a head that both the configuration and an engine of vLLM take; files with others have their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.tiny_llama(tmp_path_factory.mktemp("target"), head_dim=32)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_models.tiny_eagle3_head(tmp_path_factory.mktemp("head"), target)
