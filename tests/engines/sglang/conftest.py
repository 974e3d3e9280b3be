"""Servers shared by the tests of the sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bigram_models
import httpx
import pytest
from sampling_requests import SETTINGS, SHAPE
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, serving, tiny_spec

from eagle_plugin.bench.servers import Server


@pytest.fixture(scope="session")
def bigram_target(checkpoints: Path) -> Path:
    return bigram_models.bigram_target(checkpoints / "bigram")


@pytest.fixture(scope="session")
def bigram_eagle3(checkpoints: Path, bigram_target: Path) -> Path:
    return bigram_models.bigram_eagle3_head(checkpoints / "bigram-eagle3", bigram_target)


@pytest.fixture(
    scope="package",
    params=[
        pytest.param(SYNCHRONOUS, id="synchronous"),
        pytest.param(OVERLAP, id="overlap", marks=pytest.mark.matrix),
        pytest.param(GRAPHS, id="graphs"),
    ],
)
def bigram_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bigram_target: Path, bigram_eagle3: Path
) -> Iterator[list[Server]]:
    """Plain decoding, and the plugin with trees of 16 nodes, on a target that is worth sampling from."""
    measured = SETTINGS | {"extra_flags": (*SETTINGS["extra_flags"], "--enable-metrics"), "environment": request.param}
    specs = [tiny_spec(bigram_target, **SETTINGS), tiny_spec(bigram_target, bigram_eagle3, SHAPE, **measured)]
    with serving(specs, tmp_path_factory.mktemp("bigram")) as running:
        before = httpx.get(f"{running[1].url}/metrics", trust_env=False).text
        assert "sglang:" in before and "eagle_plugin:" not in before  # ours come with the first round
        yield running


@pytest.fixture(scope="package")
def plain(bigram_servers: list[Server]) -> Server:
    return bigram_servers[0]


@pytest.fixture(scope="package")
def plugin(bigram_servers: list[Server]) -> Server:
    return bigram_servers[1]
