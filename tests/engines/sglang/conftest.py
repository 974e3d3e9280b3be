"""Servers shared by the tests of the sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bigram_models
import httpx
import peagle_models
import pytest
from sampling_requests import SETTINGS, SHAPE, ways_of_rounds
from serving import serving, tiny_spec

from eagle_plugin.bench.servers import Server


@pytest.fixture(scope="session")
def bigram_target(checkpoints: Path) -> Path:
    return bigram_models.bigram_target(checkpoints / "bigram")


@pytest.fixture(scope="session")
def bigram_eagle3(checkpoints: Path, bigram_target: Path) -> Path:
    return bigram_models.bigram_eagle3_head(checkpoints / "bigram-eagle3", bigram_target)


@pytest.fixture(scope="session")
def bigram_peagle(checkpoints: Path, bigram_target: Path) -> Path:
    """A head of three layers: four levels of what the target most likely says, with noise on the logits."""
    kept = bigram_models.spoken(bigram_target)
    return peagle_models.peagle_head(checkpoints / "bigram-peagle", bigram_target, kept, wrong=0.5)


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory, bigram_target: Path) -> Iterator[Server]:
    """Plain decoding of a target that is worth sampling from."""
    with serving([tiny_spec(bigram_target, **SETTINGS)], tmp_path_factory.mktemp("plain")) as (server,):
        yield server


@pytest.fixture(
    scope="package",
    params=ways_of_rounds("synchronous"),  # test_parallel_heads.py: short forms with graphs
)
def plugin(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bigram_target: Path
) -> Iterator[Server]:
    """The same target with the plugin's trees of 16 nodes, in each of the ways in which rounds run."""
    environment, head = request.param
    settings = SETTINGS | {"extra_flags": (*SETTINGS["extra_flags"], "--enable-metrics"), "environment": environment}
    spec = tiny_spec(bigram_target, request.getfixturevalue(head), SHAPE, **settings)
    with serving([spec], tmp_path_factory.mktemp("plugin")) as (server,):
        before = httpx.get(f"{server.url}/metrics", trust_env=False).text
        assert "sglang:" in before and "eagle_plugin:" not in before  # ours come with the first round
        yield server
