"""Servers as users start them, of both engines: the field of a request comes from HTTP to the round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bigram_models
import httpx
import pytest
from serving import VLLM_PYTHON, serving, tiny_spec, vllm_spec

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = [
    pytest.mark.server,
    pytest.mark.matrix,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`"),
]
ROOT = Path(__file__).parents[2]
PROMPT = "tree root leaf"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("by-request")
    target = bigram_models.bigram_target(folder / "target")
    head = bigram_models.bigram_eagle3_head(folder / "head", target)
    shared = {"EAGLE_PLUGIN": "1", "EAGLE_POLICY": "fixed"}
    flags = ("--skip-server-warmup", "--enable-metrics")
    specs = [
        tiny_spec(target, head, extra_flags=flags, environment=shared),
        vllm_spec(target, head, environment=shared | {"PYTHONPATH": str(ROOT)}),
    ]
    with serving(specs, folder / "logs", as_users=True) as running:
        yield dict(zip(("sglang", "vllm"), running, strict=True))


def post(server: Server, path: str = "/v1/completions", headers: dict[str, str] | None = None, **more: Any) -> Any:
    name = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]
    body = {"model": name, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | more
    if path == "/v1/completions":
        body.setdefault("prompt", PROMPT)
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=600, trust_env=False)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def drafted_tokens(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    name = "eagle_plugin:drafted_tokens_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_request_without_drafts(engine: str, servers: dict[str, Server]) -> None:
    server, off = servers[engine], {"eagle_plugin": {"draft": False}}
    expected = text_of(post(server))
    before = drafted_tokens(server)
    assert before > 0
    own = {"custom_params": {"eagle_plugin": {"draft": False}}, "vllm_xargs": {"eagle_plugin": "draft=off"}}
    own.pop("vllm_xargs" if engine == "sglang" else "custom_params")
    ways: list[dict[str, Any]] = [off, {"headers": {"X-Eagle-Plugin": "draft=off"}}, own]
    for way in ways:
        assert text_of(post(server, **way)) == expected
    streamed = post(server, stream=True, **off)
    assert streamed.status_code == 200 and streamed.text.rstrip().endswith("data: [DONE]")
    messages = [{"role": "user", "content": PROMPT}]
    assert post(server, "/v1/chat/completions", messages=messages, **off).status_code == 200
    assert drafted_tokens(server) == before, "a request without drafts had some"
    assert text_of(post(server, eagle_plugin={"draft": True, "sources": ["head", "lookup"]})) == expected
    assert drafted_tokens(server) > before


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_what_cannot_be_read_is_refused(engine: str, streams: bool, servers: dict[str, Server]) -> None:
    server = servers[engine]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"eagle_plugin": {"sources": ["ngram"]}}, 'eagle_plugin.sources has "ngram", wanted head or lookup'),
        ({"eagle_plugin": {"draft": "no"}}, 'eagle_plugin.draft is "no", wanted true or false'),
        ({"headers": {"X-Eagle-Plugin": "off"}}, 'eagle_plugin is "off", wanted draft=off, draft=on or sources='),
    ]
    of_engine = "custom_params" if engine == "sglang" else "vllm_xargs"
    wrong.append(({of_engine: {"eagle_plugin": "draft=no"}}, 'eagle_plugin is "draft=no", wanted draft=off'))
    for more, sentence in wrong:
        answer = post(server, stream=streams, **more)
        assert answer.status_code == 400, (more, answer.text)
        found = answer.json()
        assert sentence in found.get("error", found)["message"]
    assert text_of(post(server))
