"""A broken verifier is found out by the tests of test_sampling.py; retracted requests keep their penalties.

Both on one server, which retracts requests now and then and whose verifier can be broken while it runs.
"""

from __future__ import annotations

import broken_verifier
import pytest
from gtest import p_values
from penalised_greedy import PENALTIES, ask_penalised, assert_penalised_greedy_text
from sampling_distribution import sample
from sampling_requests import LEAST_P, PROMPT, REQUESTS, SAMPLING, SETTINGS, draw
from serving import OVERLAP, serving, tiny_spec

pytest.importorskip("sglang")
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, bigram_target, bigram_eagle3):
    """The server and the switch of its verifier.

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
    [  # the mildest faults need the most requests; vLLM's tests have all of them in `make test`, of the same verifier
        ("temperature one", 1, REQUESTS // 2),
        pytest.param("no filters", 2, REQUESTS, marks=pytest.mark.matrix),
        pytest.param("no filters", 3, 1500, marks=pytest.mark.matrix),
        ("every draft accepted", 0, REQUESTS),
        pytest.param("one key for all", 0, REQUESTS, marks=pytest.mark.matrix),
    ],
)
def test_a_broken_verifier_is_found_out(fault, number, count, faulty, bigram_target):
    """By the target's distribution in transformers, with which the same server agrees before its verifier is broken."""
    server, folder = faulty
    setting = SAMPLING[number]
    wanted = sample(bigram_target, PROMPT, setting, 4 * REQUESTS, 4, seed=number).numpy()
    assert min(p_values(draw(server, [setting], count)[0], wanted).values()) > LEAST_P
    broken_verifier.choose(folder, fault)
    try:
        found = p_values(draw(server, [setting], count)[0], wanted)
    finally:
        broken_verifier.choose(folder, "none")
    assert min(found.values()) < LEAST_P**2, found


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalised_greedy_text_of_retracted_requests(penalties, faulty, bigram_target):
    answers = ask_penalised(faulty[0], penalties)
    assert_penalised_greedy_text(answers, bigram_target, penalties)
    assert any(answer["meta_info"]["num_retractions"] > 0 for answer in answers), "nothing was retracted"
