"""Requests say whether they have drafts, and what from: text and distribution stay, and only those are drafted for that
ask for it, in one batch with the others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import broken_verifier
import httpx
import pytest
from gtest import p_values
from sampling_distribution import sample
from sampling_requests import LEAST_P, PROMPT, REQUESTS, SAMPLING, SETTINGS, ask, draw
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, generate, responses, serving, tiny_spec
from word_prompts import make_prompts

pytest.importorskip("sglang")
from eagle_plugin.bench.servers import Server

pytestmark = pytest.mark.server
TOKENS = 40
OFF, HEAD, LOOKUP = {"draft": False}, {"sources": ["head"]}, {"sources": ["lookup"]}


def asking(field: Any) -> dict[str, Any]:
    """Sampling parameters of the engine with this field."""
    return {"custom_params": {"eagle_plugin": field}}


def mixed(server: Server, prompts: Sequence[str], fields: Sequence[Any], tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Answers to all prompts at the same time, each with its own field; None: without any."""

    def one(prompt: str, field: Any) -> dict[str, Any]:
        return generate(server, prompt, tokens, **({} if field is None else asking(field)))

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts, fields))


def accepted(answers: Sequence[dict[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)


def complete(server: Server, prompt: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False)


def drafted_tokens(server: Server) -> float:
    """By the server's metrics."""
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    name = "eagle_plugin:drafted_tokens_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_requests_without_drafts_beside_others(plugin: Server, plain: Server) -> None:
    """Greedy text is that of plain decoding; every second request accepts nothing, the others do."""
    prompts = make_prompts(8)
    expected = responses(mixed(plain, prompts, [None] * 8))
    answers = mixed(plugin, prompts, [None, OFF] * 4)
    assert responses(answers) == expected
    drafting, without = answers[::2], answers[1::2]
    assert accept_length(drafting) > 1.2
    assert accepted(without) == 0 and accept_length(without) == 1
    before = drafted_tokens(plugin)
    assert responses(mixed(plugin, prompts, [OFF] * 8)) == expected
    assert drafted_tokens(plugin) == before, "rounds for requests without drafts had trees"


def test_over_http(plugin: Server, plain: Server) -> None:
    """By a field of the body or a header, streamed or not; what cannot be read is refused, and the server lives on."""
    expected = complete(plain, PROMPT).json()["choices"][0]["text"]
    field = {"eagle_plugin": OFF}
    before = drafted_tokens(plugin)
    ways: list[dict[str, Any]] = [field, {"headers": {"X-Eagle-Plugin": "draft=off"}}, field | {"n": 2}]
    for way in ways:
        answer = complete(plugin, PROMPT, **way)
        assert [choice["text"] for choice in answer.json()["choices"]] == [expected] * way.get("n", 1)
    streamed = complete(plugin, PROMPT, stream=True, **field).text
    assert streamed.count("data: ") > TOKENS / 2 and streamed.rstrip().endswith("data: [DONE]")
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "eagle_plugin": OFF}
    answer = httpx.post(f"{plugin.url}/v1/chat/completions", json=chat, timeout=600, trust_env=False)
    assert answer.status_code == 200 and drafted_tokens(plugin) == before

    wrong = {"eagle_plugin": {"sources": ["ngram"]}}
    for more in (wrong, wrong | {"stream": True}):
        refused = complete(plugin, PROMPT, **more)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == 'eagle_plugin.sources has "ngram", wanted head or lookup'
    parameters = {"text": PROMPT, "sampling_params": asking({"draft": "no"})}
    refused = httpx.post(f"{plugin.url}/generate", json=parameters, timeout=600, trust_env=False)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == 'eagle_plugin.draft is "no", wanted true or false'
    # Sources that the server does not have are left out.
    for sources in (["lookup"], ["head", "lookup"]):
        answer = complete(plugin, PROMPT, eagle_plugin={"sources": sources})
        assert answer.json()["choices"][0]["text"] == expected
    assert drafted_tokens(plugin) > before


WAYS = {
    "graphs": GRAPHS,
    "synchronous": SYNCHRONOUS,
    "the policy": OVERLAP | {"EAGLE_POLICY": "auto"},
    "retraction": OVERLAP | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"},
}


# What changes the logits at each node of a tree.
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.1, "max_new_tokens": 40},
    {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 40},
    {"temperature": 0, "regex": "[ -~]{24}", "max_new_tokens": 40, "ignore_eos": False},
]


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_sources_in_mixed_batches(way, tmp_path, bigram_target, bigram_eagle3, bigram_peagle):
    """Heads that draft level by level and all levels at once, on a server that looks branches up."""
    environment = WAYS[way] | {"EAGLE_LOOKUP": "on"}
    flags = {"extra_flags": ("--skip-server-warmup", "--enable-metrics")}
    specs = [
        tiny_spec(bigram_target, **flags),
        *(
            tiny_spec(bigram_target, head, (3, 4, 16), environment=environment, **flags)
            for head in (bigram_eagle3, bigram_peagle)
        ),
    ]
    fields = [None, OFF, HEAD, LOOKUP] * 4
    prompts = [f"{prompt} {prompt}" for prompt in make_prompts(len(fields), longest=8)]
    with serving(specs, tmp_path) as (plain, *trees):
        expected = responses(mixed(plain, prompts, [None] * len(fields), 64))
        for server in trees:
            for _ in range(2):  # then from the prefix cache
                answers = mixed(server, prompts, fields, 64)
                assert responses(answers) == expected
                without = answers[1::4]
                assert accepted(without) == 0
                if way != "the policy":  # which may find that plain decoding is faster
                    assert all(accepted(answers[i::4]) > 0 for i in (0, 2, 3))
                if way != "retraction":  # a request that resumes has rounds that are counted twice
                    assert accept_length(without) == 1
            before = drafted_tokens(server)
            assert responses(mixed(server, prompts, [OFF] * len(fields), 64)) == expected
            assert drafted_tokens(server) == before
            for more in PARAMETERS:  # the same for each, whatever it is drafted from
                asked = [more | ({} if field is None else asking(field)) for field in fields[:4]]
                answers = ask(server, [PROMPT] * 4, asked)
                assert len({answer["text"] for answer in answers}) == 1 and accepted(answers[1:2]) == 0


DISTRIBUTIONS = [(OFF, "temperature one", 1), (LOOKUP, "every draft accepted", 0), (HEAD, "every draft accepted", 2)]


@pytest.mark.matrix
@pytest.mark.parametrize(("field", "fault", "number"), DISTRIBUTIONS)
def test_sampled_text_has_the_targets_distribution(field, fault, number, faulty, bigram_target):
    """Beside requests that say nothing; the control is the same server with a broken verifier."""
    server, folder = faulty
    setting = SAMPLING[number]
    # What it says most likely comes twice: after the second beginning there is something to look up.
    prompt = f"{PROMPT}{generate(server, PROMPT, 12)['text']} {PROMPT}"
    wanted = sample(bigram_target, prompt, setting, 4 * REQUESTS, 4, seed=number).numpy()

    def least() -> float:
        drawn, _ = draw(server, [setting | asking(field), setting], REQUESTS, prompt=prompt)
        return min(p_values(drawn, wanted).values())

    assert least() > LEAST_P
    broken_verifier.choose(folder, fault)
    try:
        assert least() < LEAST_P**2
    finally:
        broken_verifier.choose(folder, "none")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, bigram_target, bigram_eagle3):
    """A server with lookups and a switch of its verifier, and the switch."""
    folder = tmp_path_factory.mktemp("faulty")
    environment = broken_verifier.install(folder) | OVERLAP | {"EAGLE_LOOKUP": "on"}
    spec = tiny_spec(bigram_target, bigram_eagle3, (3, 2, 8), environment=environment, **SETTINGS)
    with serving([spec], folder) as (server,):
        yield server, folder
