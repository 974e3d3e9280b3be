"""A vLLM server whose worker dies in a step ends as it does without the plugin: no client waits for ever."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import bigram_models
import httpx
import psutil
import pytest
from serving import VLLM_PYTHON, serving, vllm_spec

from eagle_plugin.bench.servers import Server
from eagle_plugin.bench.spec import ServerSpec

pytestmark = [
    pytest.mark.server,
    pytest.mark.matrix,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`"),
]

CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = ("--tensor-parallel-size", "2")
ENDS_WITHIN_S = 120


def spec_of(folder: Path, plugin: bool, victim: str, is_async: bool) -> ServerSpec:
    """A server of one rank, or of two where one of them is to die."""
    target = bigram_models.bigram_target(folder / "target", heads=10)
    head = bigram_models.bigram_eagle3_head(folder / "head", target) if plugin else None
    changes: dict = {"is_async": is_async}
    if victim.startswith("Worker"):
        bound = f"{CORES[0]}|{CORES[-1]}"
        changes |= {"extra_flags": TWO_RANKS, "environment": {"PYTHONPATH": "", "VLLM_CPU_OMP_THREADS_BIND": bound}}
    return vllm_spec(target, head, **changes)


def processes(server: Server) -> list[psutil.Process]:
    """The server's own and those that it started."""
    assert server._process is not None
    first = psutil.Process(server._process.pid)
    return [first, *first.children(recursive=True)]


def find(server: Server, name: str) -> psutil.Process:
    """The process with this name in its title."""
    (found,) = [process for process in processes(server) if name in " ".join(process.cmdline())]
    return found


def stream(server: Server, started: threading.Event, ended: threading.Event) -> None:
    """Ask for a long answer, and wait until it breaks off."""
    body = {"model": "default", "prompt": "tree root leaf", "max_tokens": 450, "ignore_eos": True, "stream": True}
    body["model"] = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]
    with contextlib.suppress(httpx.HTTPError):
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=ENDS_WITHIN_S, trust_env=False) as response:
            for _ in response.iter_lines():
                started.set()
    ended.set()


# On a CPU stock vLLM has no asynchronous scheduling.
@pytest.mark.parametrize(
    ("plugin", "is_async"), [(False, False), (True, False), (True, True)], ids=["plain", "plugin", "plugin async"]
)
@pytest.mark.parametrize("victim", ["EngineCore", "Worker_TP1"])
def test_a_worker_that_dies_in_a_step_ends_the_server(
    victim: str, plugin: bool, is_async: bool, tmp_path: Path
) -> None:
    started, ended = threading.Event(), threading.Event()
    with serving([spec_of(tmp_path, plugin, victim, is_async)], tmp_path / "logs") as (server,):
        known = processes(server)
        asking = threading.Thread(target=stream, args=(server, started, ended), daemon=True)
        asking.start()
        assert started.wait(60), "no text came"
        find(server, victim).kill()
        assert ended.wait(ENDS_WITHIN_S), "the client waits for ever"
        until = time.monotonic() + ENDS_WITHIN_S
        while (left := [p for p in known if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]) and (
            time.monotonic() < until
        ):
            time.sleep(0.5)
        assert not left, f"still running: {[' '.join(p.cmdline()) for p in left]}"
