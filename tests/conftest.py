"""Fixtures shared by all tests: tiny checkpoints, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny_target(checkpoints: Path) -> Path:
    return tiny_models.tiny_llama(checkpoints / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_eagle3(checkpoints: Path, tiny_target: Path) -> Path:
    return tiny_models.tiny_eagle3_head(checkpoints / "tiny-eagle3", tiny_target)


@pytest.fixture(scope="session")
def tiny_eagle3_reduced(checkpoints: Path, tiny_target: Path) -> Path:
    """A head with a draft vocabulary of 128 tokens and its own aux layers."""
    path = checkpoints / "tiny-eagle3-reduced"
    return tiny_models.tiny_eagle3_head(path, tiny_target, draft_vocab=128, aux_layers=(1, 4, 6))


@pytest.fixture(scope="session")
def tiny_eagle2(checkpoints: Path, tiny_target: Path) -> Path:
    return tiny_models.tiny_eagle2_head(checkpoints / "tiny-eagle2", tiny_target)


@pytest.fixture(scope="session")
def markov_target(checkpoints: Path) -> Path:
    return tiny_models.markov_target(checkpoints / "markov")


@pytest.fixture(scope="session")
def markov_eagle3(checkpoints: Path, markov_target: Path) -> Path:
    return tiny_models.markov_eagle3_head(checkpoints / "markov-eagle3", markov_target)


@pytest.fixture(scope="session")
def markov_eagle3_reduced(checkpoints: Path, markov_target: Path) -> Path:
    return tiny_models.markov_eagle3_head(checkpoints / "markov-eagle3-reduced", markov_target, reduced=True)


@pytest.fixture(scope="session")
def markov_eagle2(checkpoints: Path, markov_target: Path) -> Path:
    return tiny_models.markov_eagle2_head(checkpoints / "markov-eagle2", markov_target)
