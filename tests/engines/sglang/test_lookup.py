"""Looked-up branches in SGLang: the text is that of plain decoding, sampled text has its distribution, and what a
request repeats is accepted; whose text is looked up stays right under chunks, the prefix cache and retraction."""

from __future__ import annotations

import broken_verifier
import httpx
import pytest
from gtest import p_values
from sampling_distribution import sample
from sampling_requests import LEAST_P, PROMPT, REQUESTS, SAMPLING, SETTINGS, draw
from serving import GRAPHS, OVERLAP, SYNCHRONOUS, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

ON = {"EAGLE_LOOKUP": "on"}
WAYS = {
    "overlap and graphs": GRAPHS,
    "synchronous": SYNCHRONOUS,
    "retraction": OVERLAP | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"},
}


def repeated(prompts: list[str]) -> list[str]:
    """What a request says twice, so that much is looked up from its first round on."""
    return [f"{prompt} {prompt} {prompt}" for prompt in prompts]


@pytest.mark.parametrize(
    ("way", "servers"),
    [("overlap and graphs", 2), *(pytest.param(name, 3, marks=pytest.mark.matrix) for name in WAYS)],
)
def test_greedy_text_is_that_of_plain_decoding(way, servers, tmp_path, tiny_target, tiny_eagle3, tiny_eagle3_reduced):
    """Random shapes, 16 requests in few rows one after the other, prompts of more than a chunk, from the cache too."""
    flags = ("--skip-server-warmup", "--enable-metrics")
    chunked = (*flags, "--chunked-prefill-size", "32")
    environment = WAYS[way] | ON
    specs = [
        tiny_spec(tiny_target, extra_flags=flags),
        tiny_spec(tiny_target, tiny_eagle3, (6, 4, 32), extra_flags=chunked, environment=environment),
        tiny_spec(tiny_target, tiny_eagle3_reduced, (3, 1, 4), extra_flags=flags, environment=environment),
    ]
    prompts = repeated(make_prompts(16))
    with serving(specs[:servers], tmp_path) as (plain, *trees):
        expected = responses(generate_all(plain, prompts, 64, at_once=8))
        assert len(set(expected)) > 12, "the target repeats itself: equality would prove little"
        for server in trees:
            for _ in range(2):  # then from the prefix cache
                answers = generate_all(server, prompts, 64, at_once=4)
                assert responses(answers) == expected
            assert "eagle-plugin: branches are looked up in the last" in server.log_text()
        proposed, accepted = looked_up(trees[0])
        assert proposed > 100 and 0 < accepted <= proposed
        if way == "retraction":
            assert any(answer["meta_info"]["num_retractions"] > 0 for answer in answers), "nothing was retracted"


def looked_up(server) -> tuple[float, float]:
    """Nodes that only looked-up paths brought into trees, and how many were accepted, by the server's metrics."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    values = {}
    for line in text.splitlines():
        name = line.partition("{")[0].removeprefix("eagle_plugin:")
        if not line.startswith("#") and name.startswith("looked_up"):
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values["looked_up_tokens_total"], values["looked_up_accepted_tokens_total"]


@pytest.mark.matrix
def test_a_head_that_knows_nothing_accepts_what_the_text_repeats(tmp_path, markov_target):
    """A target whose text goes in circles, and a head that is right about one token."""
    import peagle_models
    from tiny_models import read_markov_map

    successor = read_markov_map(markov_target)
    kept = sorted(set(successor.tolist()))
    head = peagle_models.peagle_head(tmp_path / "head", markov_target, kept, layers=1)
    specs = [
        tiny_spec(markov_target, head, (8, 2, 16), environment=SYNCHRONOUS | environment) for environment in ({}, ON)
    ]
    with serving(specs, tmp_path) as servers:
        without, with_lookups = (generate_all(server, ["root"] * 2, 200, at_once=1) for server in servers)
        assert responses(with_lookups) == responses(without)
        assert accept_length(with_lookups) > 1.1 * accept_length(without)


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(len(SAMPLING)))
def test_sampled_text_has_the_targets_distribution(number, faulty, bigram_target):
    """As in test_broken_verifier.py: the control is the same server with a broken verifier."""
    server, folder = faulty
    setting = SAMPLING[number]
    wanted = sample(bigram_target, PROMPT, setting, 4 * REQUESTS, 4, seed=number).numpy()
    assert min(p_values(draw(server, [setting], REQUESTS)[0], wanted).values()) > LEAST_P
    if number:
        return
    broken_verifier.choose(folder, "every draft accepted")
    try:
        found = p_values(draw(server, [setting], REQUESTS)[0], wanted)
    finally:
        broken_verifier.choose(folder, "none")
    assert min(found.values()) < LEAST_P**2, found


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, bigram_target, bigram_eagle3):
    """A server with lookups and a switch of its verifier, and the switch."""
    folder = tmp_path_factory.mktemp("faulty")
    environment = broken_verifier.install(folder) | OVERLAP | ON
    spec = tiny_spec(bigram_target, bigram_eagle3, (3, 2, 8), environment=environment, **SETTINGS)
    with serving([spec], folder) as (server,):
        yield server, folder
