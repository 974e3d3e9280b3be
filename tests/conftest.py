"""Fixtures shared by all tests: tiny checkpoints, written once per session."""

from __future__ import annotations

import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import peagle_models
import pytest
import schedule
import tiny_models
import torch
import vllm_forks

torch.set_num_threads(1)
# No test uses the credentials of its user, or asks the metadata service of a cloud for some.
os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
# Linux moves memory about to make huge pages, seconds of each server that starts.
os.environ.setdefault("EAGLE_HUGE_PAGES", "0")
os.environ |= {"AWS_REGION": "us-east-1", "GOOGLE_SKIP_SIGNATURE": "true", "AZURE_SKIP_SIGNATURE": "true"}

if importlib.util.find_spec("vllm") is None:  # tests/test_vllm_environment.py runs these in the environment that has it
    collect_ignore_glob = ["engines/vllm/test_*.py", "heads/test_vllm_*.py"]
else:
    os.environ |= vllm_forks.OF_ENGINES


def pytest_collection_finish() -> None:
    """The modules that the tests import are never garbage: collections that engines ask for need not walk them."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts, about equally long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part:
        config.hook.pytest_deselected(items=schedule.keep_part(items, config.option.part))
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        schedule.longest_first(items)


@pytest.hookimpl(optionalhook=True)  # the vLLM environment has no pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.make_scheduler(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where --durations is given: the seconds of the longest groups, for schedule.SECONDS."""
    if terminalreporter.config.option.durations is None:
        return
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    for group, seconds in schedule.seconds_by_group(reports):
        if seconds >= 10:
            terminalreporter.write_line(f"group {seconds:6.0f} s  {group}")


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
def markov_peagle(checkpoints: Path, markov_target: Path) -> Path:
    """A head of three layers, right at four levels, with a draft vocabulary."""
    kept = sorted(set(tiny_models.read_markov_map(markov_target).tolist()))
    return peagle_models.peagle_head(checkpoints / "markov-peagle", markov_target, kept)


@pytest.fixture(scope="session")
def markov_eagle2(checkpoints: Path, markov_target: Path) -> Path:
    return tiny_models.markov_eagle2_head(checkpoints / "markov-eagle2", markov_target)
