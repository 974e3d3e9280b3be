"""Both engines' servers, really started, capture what they answer."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from serving import VLLM_PYTHON, serving, tiny_spec, vllm_spec

from eagle_plugin.bench.servers import Server
from eagle_plugin.learning.data.sources.answers import read_answers
from eagle_plugin.learning.data.target_identity import target_digests
from eagle_plugin.learning.data.traffic.segments import segments_of

pytest.importorskip("sglang")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="there is no .venv-vllm; make it with `make env-vllm`"),
]
ROOT = Path(__file__).parents[2]
MAIL = "anna.berg@firma.de"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Server, Path]]]:
    """By engine, with the folder of its capture: SGLang with a head, vLLM without one, and with a filter from here."""
    folder = tmp_path_factory.mktemp("capture")
    target = tiny_models.tiny_llama(folder / "target", head_dim=32)
    head = tiny_models.tiny_eagle3_head(folder / "head", target)
    captures = {engine: folder / f"of-{engine}" for engine in ("sglang", "vllm")}

    def environment(engine: str, **more: str) -> dict[str, str]:
        return {
            "EAGLE_PLUGIN": "1",
            "EAGLE_POLICY": "fixed",
            "EAGLE_CAPTURE": str(captures[engine]),
            "EAGLE_CAPTURE_PRIVACY": "redact",
            "EAGLE_CAPTURE_PYTHON": sys.executable,
            **more,
        }

    flags = ("--skip-server-warmup", "--enable-metrics")
    specs = [
        tiny_spec(target, head, extra_flags=flags, environment=environment("sglang")),
        vllm_spec(target, environment=environment("vllm", PYTHONPATH=str(ROOT))),
    ]
    with serving(specs, folder / "logs") as running:
        yield {engine: (server, captures[engine]) for engine, server in zip(("sglang", "vllm"), running, strict=True)}


def ask(server: Server, text: str, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"model": httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]} | more
    body |= {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, json=body, headers=headers, timeout=600, trust_env=False)
    response.raise_for_status()
    return response


def counted(server: Server) -> dict[str, float]:
    """Our metrics of captures, by name and reason."""
    found = {}
    for line in httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("eagle_plugin:capture_") and "_total{" in line:
            name, _, rest = line.removeprefix("eagle_plugin:capture_").partition("_total{")
            reason = rest.partition('reason="')[2].partition('"')[0]
            found[f"{name} {reason}".strip()] = float(line.rsplit(" ", 1)[1])
    return found


def wait_for(count: int, server: Server, folder: Path, opt_out: int) -> list[dict[str, Any]]:
    end = time.monotonic() + 120  # a busy machine
    while counted(server).get("records", 0) < count or counted(server).get("dropped opt_out", 0) < opt_out:
        assert time.monotonic() < end, counted(server)
        server.check_alive()
        time.sleep(0.5)
    return [json.loads(line) for path in segments_of(folder) for line in path.open()]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_plain_and_a_streamed_answer_are_captured(engine: str, servers: dict[str, tuple[Server, Path]]) -> None:
    server, folder = servers[engine]
    answers = [ask(server, f"I am {MAIL}").json(), ask(server, "Go on", stream=True).text]
    ask(server, "Not this one", headers={"X-Eagle-Capture": "off"})
    records = wait_for(2, server, folder, opt_out=1)
    responses = [read_answers(answer)[0].message["content"] for answer in answers]
    assert [record["response"]["text"] for record in records] == responses and all(responses)
    assert [record["request"]["messages"][-1]["content"] for record in records] == ["I am <EMAIL_1>", "Go on"]
    assert [record["response"]["finish_reason"] for record in records] == ["length", "length"]
    assert MAIL not in "".join(path.read_text() for path in folder.iterdir())
    target = folder.parent / "target"
    assert [record["target"] for record in records] == [{"name": "target", **target_digests(target)}] * 2
    found = counted(server)
    assert (found["records"], found["filtered"], found["dropped opt_out"]) == (2, 1, 1)
    assert found["bytes"] == sum(path.stat().st_size for path in segments_of(folder))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_other_routes_are_captured(engine: str, servers: dict[str, tuple[Server, Path]]) -> None:
    """With the domain that the client names; SGLang tells how many drafts its rounds accepted."""
    server, folder = servers[engine]
    before = len([line for path in segments_of(folder) for line in path.open()])
    body = {"model": httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]}
    body |= {"input": "Tell me", "instructions": "Be kind", "temperature": 0, "max_output_tokens": 12}
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    asked = [("/v1/responses", body), ("/v1/responses", body | {"stream": True})]
    if engine == "sglang" and importlib.util.find_spec("openai_harmony") is None:  # without it SGLang has no such route
        asked = []
    if engine == "sglang":
        text = {"text": "Once upon", "sampling_params": sampling}
        asked += [("/generate", text), ("/generate", text | {"stream": True})]
    for path, request in asked:
        url, headers = f"{server.url}{path}", {"X-Eagle-Domain": "stories"}
        httpx.post(url, json=request, headers=headers, timeout=600, trust_env=False).raise_for_status()
    records = wait_for(before + len(asked), server, folder, opt_out=0)[before:]
    assert {record["domain"] for record in records} == {"stories"}
    turns = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Tell me"}]
    assert all(record["request"].get("messages", turns) == turns for record in records)
    pairs = [records[place : place + 2] for place in range(0, len(records), 2)]
    for plain, streamed in pairs:
        assert plain["response"]["text"] == streamed["response"]["text"] != ""
        assert plain["response"]["finish_reason"] == streamed["response"]["finish_reason"] == "length"
    if engine == "sglang":
        for record in pairs[-1]:
            assert record["request"]["prompt"] == "Once upon"
            drafts = record["response"]["accepted_drafts"]
            assert sum(drafts) <= 11 <= sum(rounds * (depth + 1) for depth, rounds in enumerate(drafts))
