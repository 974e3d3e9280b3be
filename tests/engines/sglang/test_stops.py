"""Stops under a head that is always right: a round yields 7 tokens, and ends where plain decoding ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sampling_requests import ask
from serving import OVERLAP, SYNCHRONOUS, accept_length, serving, tiny_spec
from stop_requests import LENGTH, PROMPT, RUN, Models, stop_settings, write_models

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("stops"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((OVERLAP | {"EAGLE_POLICY": "fixed"}, (RUN - 1, 2, 12)), id="overlap"),
        pytest.param((SYNCHRONOUS, (RUN - 1, 1, RUN)), id="synchronous", marks=pytest.mark.matrix),  # the same hook
    ],
)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Models
) -> Iterator[list[Server]]:
    """Plain decoding and the plugin."""
    environment, shape = request.param
    more: dict[str, Any] = {"max_running_requests": 32}
    specs = [
        tiny_spec(models.target, **more),
        tiny_spec(models.target, models.head, shape, environment=environment, **more),
    ]
    with serving(specs, tmp_path_factory.mktemp("servers")) as running:
        yield running


def endings(answers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    found = []
    for answer in answers:
        meta = answer["meta_info"]
        logprobs = [token for _, token, _ in meta["output_token_logprobs"]]
        found.append((answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"], logprobs))
    return found


def test_a_round_ends_where_plain_decoding_ends(servers: list[Server], models: Models) -> None:
    plain, plugin = servers
    settings = stop_settings(models.ids, models.pieces)
    prompts = [PROMPT] * len(settings)
    wanted = endings(ask(plain, prompts, settings, return_logprob=True))
    assert len(settings) > 150 and len({text for text, *_ in wanted}) > 3 * RUN
    assert {reason["type"] for _, _, reason, *_ in wanted} == {"stop", "length"}
    found = endings(ask(plugin, prompts, settings, return_logprob=True))
    differ = [(s, f, w) for s, f, w in zip(settings, found, wanted, strict=True) if f != w]
    assert not differ, f"{len(differ)} of {len(settings)} differ, the first: {differ[0]}"
    whole = ask(plugin, [PROMPT], {"temperature": 0, "max_new_tokens": 1 + 4 * RUN})
    assert accept_length(whole) == RUN  # or there was no run to end in


def streamed(server: Server, body: dict[str, Any]) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens of a stream."""
    text, reason, tokens = "", "", 0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"] or reason
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return text, reason, tokens


def test_a_stream_ends_where_plain_decoding_ends(servers: list[Server], models: Models) -> None:
    plain, plugin = servers
    common = {"model": "default", "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "stream": True}
    for i in range(RUN, 2 * RUN):
        later, first = "".join(models.pieces[i + 3 : i + 5]), "".join(models.pieces[i : i + 2])
        body = common | {"stop": [later, first], "ignore_eos": True, "stream_options": {"include_usage": True}}
        wanted = streamed(plain, body)
        assert wanted[1:] == ("stop", i + 2) and first not in wanted[0]
        assert streamed(plugin, body) == wanted
