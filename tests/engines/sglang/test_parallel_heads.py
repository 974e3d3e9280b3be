"""P-EAGLE heads in SGLang, with the flags of an EAGLE-3 head: short forms of the tests of the sampling parameters.

The servers are one round ahead, with captured functions and rounds of random shapes, plain ones among them. The matrix
runs the tests of sampling, seeds, grammars and penalties whole with such a head (conftest.py). test_perfect_head.py has
one that is right at every level.
"""

from __future__ import annotations

import json
from itertools import zip_longest

import pytest
from gtest import p_values
from penalised_greedy import PENALTIES, PROMPTS, greedy_ids
from sampling_distribution import sample
from sampling_requests import PENALISED, PROMPT, SETTINGS, ask, draw
from serving import GRAPHS, accept_length, serving, tiny_spec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

LENGTH, REQUESTS = 40, 1000
LEAST_P = 1e-4 / (6 * 2)  # six views of two settings: a right verifier fails one of these tests once in 10,000 runs


@pytest.fixture(scope="module")
def server(tmp_path_factory, bigram_target, bigram_peagle):
    """Chunks of 16 prompt tokens: the head's rows of a prompt come from several forwards."""
    flags = (*SETTINGS["extra_flags"], "--chunked-prefill-size", "16")
    settings = SETTINGS | {"extra_flags": flags, "environment": GRAPHS}
    spec = tiny_spec(bigram_target, bigram_peagle, (4, 3, 16), **settings)
    with serving([spec], tmp_path_factory.mktemp("peagle")) as (running,):
        yield running


@pytest.mark.parametrize("penalties", [{}, PENALTIES[0]], ids=["plain", "penalised"])
def test_greedy_text_is_that_of_transformers(penalties, server, bigram_target):
    """With penalties the text does not soon go round in a circle; the second time it comes from the prefix cache."""
    prompts = [*PROMPTS, *(f"{prompt} " * 12 for prompt in PROMPTS)]
    wanted = [greedy_ids(bigram_target, prompt, LENGTH, penalties) for prompt in prompts]
    if penalties:
        assert len(set(wanted[0])) > LENGTH // 3
    for again in range(2):
        answers = ask(server, prompts, {"temperature": 0, "max_new_tokens": LENGTH} | penalties)
        assert [answer["output_ids"] for answer in answers] == wanted, again
        assert accept_length(answers) > 1.2


def test_levels_after_the_first_are_accepted(server):
    """Were only the first level right, no round would yield more than two tokens."""
    answers = ask(server, [PROMPT] * 16, {"temperature": 0.3, "max_new_tokens": LENGTH})
    rounds = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
    drafts = [sum(counts) for counts in zip_longest(*rounds, fillvalue=0)]  # rounds by accepted drafts
    assert sum(drafts[2:]) > 0.1 * sum(drafts), drafts


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"temperature": 1.0}, id="sampled"),
        pytest.param(PENALISED, id="penalised", marks=pytest.mark.matrix),  # greedily above
    ],
)
def test_sampled_text_has_the_targets_distribution(setting, server, bigram_target):
    (drawn,) = draw(server, [setting], REQUESTS)
    found = p_values(drawn, sample(bigram_target, PROMPT, setting, 4 * REQUESTS, 4, seed=1).numpy())
    assert min(found.values()) > LEAST_P, found
    other = setting | {"temperature": setting["temperature"] * 1.5}
    control = p_values(drawn, sample(bigram_target, PROMPT, other, 4 * REQUESTS, 4, seed=2).numpy())
    assert min(control.values()) < LEAST_P**2


def test_a_seed_fixes_the_text_alone_and_in_a_batch(server):
    def asked(seed: int) -> dict:
        return {"temperature": 1.0, "max_new_tokens": LENGTH, "sampling_seed": seed}

    seeds = (0, -7, 2**63 - 1)
    alone = [ask(server, [PROMPT], asked(seed))[0]["text"] for seed in seeds]
    assert len(set(alone)) == len(seeds)
    batch = [one for seed in seeds for one in (asked(seed), {"temperature": 1.0, "max_new_tokens": LENGTH})]
    assert [answer["text"] for answer in ask(server, [PROMPT] * len(batch), batch)[::2]] == alone


def test_a_json_schema_is_kept_at_every_node(server):
    schema = {"type": "object", "properties": {"a": {"enum": [True, 7, "x"]}}, "required": ["a"]}
    sampling = {"json_schema": json.dumps(schema | {"additionalProperties": False}), "ignore_eos": False}
    for temperature in (0.0, 1.0):
        answers = ask(server, PROMPTS * 2, sampling | {"temperature": temperature, "max_new_tokens": 40})
        for answer in answers:
            assert json.loads(answer["text"]) in ({"a": True}, {"a": 7}, {"a": "x"}), answer["text"]
