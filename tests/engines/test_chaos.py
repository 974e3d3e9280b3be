"""What happens to a server that serves on: its processes are stopped for a while, files vanish, its head says NaN."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import planted_faults
import pytest
from bigram_models import bigram_eagle3_head, bigram_target
from serving import VLLM_PYTHON, serving, tiny_spec, vllm_spec

from benchmarks.soak_checks import ask_probes
from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec

pytestmark = [
    pytest.mark.server,
    pytest.mark.matrix,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`"),
]

ENGINES = ("sglang", "vllm")
STOPPED_S = 30.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose text depends on all tokens before, and its head."""
    target = bigram_target(tmp_path_factory.mktemp("target"), noise=0.02)
    return target, bigram_eagle3_head(tmp_path_factory.mktemp("head"), target)


def spec_of(engine: str, models: tuple[Path, Path], **environment: str) -> ServerSpec:
    """A small server with the plugin."""
    make = vllm_spec if engine == "vllm" else tiny_spec
    given = {"EAGLE_POLICY": "random", **({"PYTHONPATH": ""} if engine == "vllm" else {}), **environment}
    return make(*models, (3, 2, 8), environment=given, name="chaos")


@pytest.fixture(scope="module", params=ENGINES)
def healthy(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server, Path]]:
    """The engine, a server and its cache of kernels and records."""
    cache = tmp_path_factory.mktemp("cache")
    spec = spec_of(request.param, models, EAGLE_CACHE_DIR=str(cache))
    with serving([spec], tmp_path_factory.mktemp("logs"), as_users=True) as (server,):
        yield request.param, server, cache


def test_processes_that_are_stopped_for_a_while_go_on(healthy: tuple[str, Server, Path]) -> None:
    """Each of them alone, while requests run: they end with their text."""
    _, server, _ = healthy
    expected = ask_probes(server)
    for pid in server.members():
        found: list[list[str]] = []
        asking = threading.Thread(target=lambda found=found: found.append(ask_probes(server)))
        asking.start()
        time.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S / len(server.members()))
        os.kill(pid, signal.SIGCONT)
        asking.join(300)
        assert found == [expected]


def test_a_cache_that_vanishes_is_not_missed(healthy: tuple[str, Server, Path]) -> None:
    """Of kernels, records and costs; what a running server has, it keeps."""
    _, server, cache = healthy
    expected = ask_probes(server)
    assert any(cache.iterdir())
    shutil.rmtree(cache)
    assert ask_probes(server) == expected
    server.check_alive()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_that_says_nan_costs_drafts_and_no_text(engine: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    planted = planted_faults.install(tmp_path / "planted", "nan")
    with serving([spec_of(engine, models), spec_of(engine, models, **planted)], tmp_path / "logs") as (good, bad):
        assert ask_probes(bad) == ask_probes(good)
        bad.check_alive()
