"""Real SGLang and vLLM servers for the end-to-end tests: started together, asked over HTTP, always stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from server_forks import ForkedServer, can_fork

from eagle_plugin.bench.servers import Server, check_worker
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import Shape

START_SECONDS = 600
# How SGLang's rounds run: as on a CPU, all of one shape; with the scheduler one round ahead, and of random shapes; with
# captured functions too.
SYNCHRONOUS = {"EAGLE_POLICY": "fixed"}
OVERLAP = {"EAGLE_OVERLAP": "1", "EAGLE_POLICY": "random"}
GRAPHS = OVERLAP | {"EAGLE_GRAPHS": "emulate"}
# Below the ports that the system hands out by itself, and a range for each worker of pytest-xdist: a port that is free
# while a server is started is free still when it listens, ten seconds later.
_ports = itertools.count(18000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))
VLLM_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm/bin/python"


def tiny_spec(
    target: Path, head: Path | None = None, shape: tuple[int, int, int] = (2, 4, 8), **changes: Any
) -> ServerSpec:
    """A small fp32 SGLang server: plain without a head, with the plugin otherwise."""
    settings: dict[str, Any] = {
        "mode": "plain" if head is None else "plugin",
        "dtype": "float32",
        "threads": 1,
        "context_length": 512,
        "max_total_tokens": 4096,
        "extra_flags": ("--skip-server-warmup",),
        "environment": SYNCHRONOUS,
    }
    return ServerSpec(target=target, head=head, shape=Shape(*shape), **(settings | changes))


def vllm_spec(
    target: Path, head: Path | None = None, shape: tuple[int, int, int] = (2, 4, 8), **changes: Any
) -> ServerSpec:
    """The same in vLLM, whose CPU attention wants heads of at least 32 dimensions."""
    settings: dict[str, Any] = {
        "engine": "vllm",
        "python": VLLM_PYTHON,
        "extra_flags": (),
        "environment": {"PYTHONPATH": ""},  # the paths of this environment hold another transformers
    }
    return tiny_spec(target, head, shape, **(settings | changes))


def _next_port() -> int:
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("itertools.count ended")


def answers_of_own_worker(
    target: Path, head: Path, environment: dict[str, str], logs: Path
) -> tuple[list[dict[str, Any]], str]:
    """The greedy answers and the log of a server whose own worker takes over from ours; text is plain decoding's.

    environment: has the fault for which it does.
    """
    specs = [
        tiny_spec(target),
        tiny_spec(target, head, mode="builtin", environment={"EAGLE_PLUGIN": "1", **environment}),
    ]
    with serving(specs, logs) as (plain, server):
        prompts = ["the quick brown fox", "one two three", "x = y", "a"]
        expected, found = (generate_all(one, prompts, 24, at_once=4) for one in (plain, server))
        assert responses(found) == responses(expected)
        return found, server.log_text()


@contextlib.contextmanager
def serving(
    specs: Sequence[ServerSpec], logs: Path, *, as_users: bool = False, first_path: str = ""
) -> Iterator[list[Server]]:
    """Start the servers side by side, check that the worker asked for serves, and stop them all on the way out.

    Those that can be forks of an imported engine (server_forks.py) are, unless they are to start `as_users` start them.
    first_path: a folder of modules that forks have imported the engine with.
    """
    servers: list[Server] = []
    try:
        for number, spec in enumerate(specs):
            server = Server.of(spec, logs / str(number), _next_port())
            if not as_users and can_fork(server):
                server = ForkedServer.of(spec, logs / str(number), server.port)
                server.first_path = first_path
            servers.append(server)
            server.start()
        for server, spec in zip(servers, specs, strict=True):
            server.wait_ready(START_SECONDS)
            check_worker(server, spec.mode)
        yield servers
    finally:
        with ThreadPoolExecutor() as pool:  # an SGLang server takes seconds to end
            for stopped in [pool.submit(server.stop) for server in servers]:
                stopped.result()


def generate(server: Server, prompt: str, tokens: int | None, **sampling: Any) -> dict[str, Any]:
    """One request over the native endpoint: greedy and past the end token unless `sampling` says otherwise."""
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
    answer = httpx.post(
        f"{server.url}/generate", json={"text": prompt, "sampling_params": parameters}, timeout=600, trust_env=False
    )
    answer.raise_for_status()
    return answer.json()


def generate_all(
    server: Server, prompts: Sequence[str], tokens: int, at_once: int, **sampling: Any
) -> list[dict[str, Any]]:
    """The answers to all prompts in their order, `at_once` requests at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, tokens, **sampling), prompts))


def responses(answers: Sequence[dict[str, Any]]) -> list[str]:
    return [answer["text"] for answer in answers]


def accept_length(answers: Sequence[dict[str, Any]]) -> float:
    """Generated tokens per verification, over all answers (each answer's first token comes from its prefill)."""
    tokens = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)
    return tokens / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
