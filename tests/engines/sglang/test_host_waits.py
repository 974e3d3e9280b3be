"""Decode rounds of real servers ask no tensor for its value: on a GPU the host would wait there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import host_waits
import httpx
import pytest
from sampling_requests import SETTINGS, ask
from serving import OVERLAP, serving, tiny_spec

from eagle_plugin.bench.servers import Server

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

PROMPTS = ["tree root leaf", "the quick brown fox", "a", "one two three"]
FILTERED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    FILTERED,
    FILTERED | {"sampling_seed": 3},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    FILTERED | {"frequency_penalty": 0.5, "min_new_tokens": 20},
    {"temperature": 0, "logit_bias": {"70": 4.0}},
    {"temperature": 0, "regex": "[a-z]{3}( [a-z]{2}){9}", "ignore_eos": False},
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory, bigram_target, bigram_eagle3) -> Iterator[list[tuple[Server, Path]]]:
    """A server whose rounds are watched, and one whose rounds read one value: the control."""
    specs, reports = [], []
    for control in ({}, {"EAGLE_TEST_WAITS_CONTROL": "1"}):
        folder = tmp_path_factory.mktemp("waits")
        environment = host_waits.install(folder) | OVERLAP | control
        reports.append(Path(environment["EAGLE_TEST_WAITS"]))
        specs.append(tiny_spec(bigram_target, bigram_eagle3, (3, 4, 16), environment=environment, **SETTINGS))
    with serving(specs, tmp_path_factory.mktemp("logs")) as running:
        yield list(zip(running, reports, strict=True))


def test_two_hundred_rounds_of_every_kind_of_request(servers):
    server, file = servers[0]
    for sampling in KINDS:
        for logprobs in ({}, {"return_logprob": True, "top_logprobs_num": 2}):
            ask(server, PROMPTS, sampling | {"max_new_tokens": 40}, **logprobs)
    with ThreadPoolExecutor(3) as pool:  # side by side, with one client that hangs up
        rest = [pool.submit(ask, server, PROMPTS, kind | {"max_new_tokens": 40}) for kind in KINDS[:3]]
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/generate",
                json={"text": "a", "sampling_params": {"max_new_tokens": 400}},
                timeout=0.1,
                trust_env=False,
            )
        for answer in rest:
            answer.result()
    report = json.loads(file.read_text())
    assert report["rounds"]["any"] >= 200
    for kind in ("greedy", "sampled", "penalised", "grammar", "biased", "log probabilities"):
        assert report["rounds"][kind] >= 10, kind
    assert report["findings"] == {}


def test_the_control_is_found(servers):
    server, file = servers[1]
    ask(server, PROMPTS, {"temperature": 0, "max_new_tokens": 8})
    findings = json.loads(file.read_text())["findings"]
    assert findings and all("host_waits.py" in finding for finding in findings)
