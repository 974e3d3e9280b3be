"""A target and a head that both the configuration and an engine of vLLM take; files with others have their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import vllm_forks
from log_lines import Lines


@pytest.fixture(autouse=True, scope="session")
def _forked_ranks() -> None:
    vllm_forks.fork_ranks()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.tiny_llama(tmp_path_factory.mktemp("target"), head_dim=32)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_models.tiny_eagle3_head(tmp_path_factory.mktemp("head"), target)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the plugin logs; vLLM keeps its loggers from the root, and a line is logged once per process."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    from eagle_plugin.vllm import support  # here: environments without vLLM read this file too

    configure_logging(LoggingConfig())  # else the first configuration of the process takes the handler away
    monkeypatch.setattr(support, "_logged", set())
    logger, handler = logging.getLogger("vllm.eagle_plugin"), Lines()
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(handler)
    yield handler.logged
    logger.removeHandler(handler)


@pytest.fixture
def gpu_config(target: Path, head: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the configuration of a GPU as it is when the plugin sees it."""
    from vllm_configs import of_a_gpu

    def make(**options: Any) -> Any:
        made = of_a_gpu(target, head, monkeypatch, **options)
        lines.clear()  # that the plugin is switched off
        return made

    return make
