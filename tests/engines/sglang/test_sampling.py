"""Sampled and penalised text has exactly the target's distribution, and a broken verifier is found out."""

from __future__ import annotations

import broken_verifier
import pytest
from gtest import p_values
from sampling_distribution import greedy, sample
from sampling_requests import PENALISED, PENALTIES, PROMPT, PROMPTS, SETTINGS, ask, draw
from serving import OVERLAP, accept_length, serving, tiny_spec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
]
REQUESTS = 1000  # per setting
VIEWS = 6
LEAST_P = 1e-4 / (VIEWS * (len(SAMPLING) + 1))  # a right verifier fails one of these tests once in 10,000 runs


@pytest.fixture(scope="module")
def drawn(plugin):
    """Sequences [REQUESTS, 4] of the plugin, for each setting of SAMPLED."""
    return draw(plugin, SAMPLING, REQUESTS)


@pytest.fixture(scope="module")
def expected(plain):
    """Sequences [2 * REQUESTS, 4] of plain decoding; its penalties come a token late, so they are left out."""
    return draw(plain, SAMPLING, 2 * REQUESTS)


@pytest.mark.parametrize("number", range(len(SAMPLING)))
def test_sampled_text_has_the_distribution_of_plain_decoding(number, drawn, expected):
    found = p_values(drawn[number], expected[number])
    assert len(found) == VIEWS
    assert min(found.values()) > LEAST_P, (SAMPLING[number], found)


def test_penalised_text_has_the_targets_distribution(plugin, bigram_target):
    (drawn,) = draw(plugin, [PENALISED], 2 * REQUESTS)
    found = p_values(drawn, sample(bigram_target, PROMPT, PENALISED, 4 * REQUESTS, 4, seed=1).numpy())
    assert min(found.values()) > LEAST_P, found
    forgotten = {name: value for name, value in PENALISED.items() if "penalty" not in name}
    control = p_values(drawn, sample(bigram_target, PROMPT, forgotten, 4 * REQUESTS, 4, seed=2).numpy())
    assert min(control.values()) < LEAST_P**2


def test_drafts_are_accepted_at_every_temperature(plugin):
    """Were they not, the tests above would say little about trees."""
    for setting in (*SAMPLING, PENALISED):
        answers = ask(plugin, [PROMPT] * 64, setting | {"max_new_tokens": 24})
        assert accept_length(answers) > 1.4, setting


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, bigram_target, bigram_eagle3):
    """A server whose verifier can be broken, and which retracts requests now and then; yields it and its switch.

    Its scheduler is one round ahead; the faults read values on the host, so that nothing is captured.
    """
    folder = tmp_path_factory.mktemp("faulty")
    environment = broken_verifier.install(folder) | OVERLAP
    environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
    spec = tiny_spec(bigram_target, bigram_eagle3, (3, 2, 8), environment=environment, **SETTINGS)
    with serving([spec], folder) as (server,):
        yield server, folder


@pytest.mark.parametrize(
    "fault, number, count",
    [  # the mildest faults need the most requests
        ("temperature one", 1, REQUESTS),
        ("no filters", 2, REQUESTS),
        pytest.param("no filters", 3, 1500, marks=pytest.mark.matrix),
        ("every draw accepted", 0, REQUESTS),
        pytest.param("every draw accepted", 1, 1500, marks=pytest.mark.matrix),
        pytest.param("one number for both", 0, 2500, marks=pytest.mark.matrix),
        pytest.param("whole p after rejection", 0, 2500, marks=pytest.mark.matrix),
    ],
)
def test_a_broken_verifier_is_found_out(fault, number, count, faulty, plain, expected):
    server, folder = faulty
    wanted = expected[number] if count == REQUESTS else draw(plain, [SAMPLING[number]], 4 * REQUESTS)[0]
    broken_verifier.choose(folder, fault)
    try:
        found = p_values(draw(server, [SAMPLING[number]], count)[0], wanted)
    finally:
        broken_verifier.choose(folder, "none")
    assert min(found.values()) < LEAST_P**2, found


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalised_greedy_text_is_that_of_transformers(penalties, plugin, faulty, bigram_target):
    """Also for requests that were retracted and resumed on the way."""
    length = 40
    wanted = [greedy(bigram_target, prompt, length, penalties) for prompt in PROMPTS]
    assert wanted != [greedy(bigram_target, prompt, length, {}) for prompt in PROMPTS]
    sampling = {"temperature": 0, "max_new_tokens": length} | penalties
    retracting, _ = faulty
    for server in (plugin, retracting):
        answers = ask(server, PROMPTS * 3, [sampling, {"temperature": 1.0, "max_new_tokens": length}] * 6)
        answers += ask(server, PROMPTS * 3, sampling)
        penalised = [*range(0, 12, 2), *range(12, 24)]
        for i in penalised:
            assert answers[i]["output_ids"] == wanted[i % len(PROMPTS)], (server.label, i)
        assert accept_length(answers[12:]) > 1.2
    assert any(answer["meta_info"]["num_retractions"] > 0 for answer in answers), "nothing was retracted"
