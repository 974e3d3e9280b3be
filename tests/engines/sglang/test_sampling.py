"""Sampled and penalised text has exactly the target's distribution; test_broken_verifier.py has the controls."""

from __future__ import annotations

import pytest
from gtest import p_values
from penalised_greedy import PENALTIES, ask_penalised, assert_penalised_greedy_text
from sampling_distribution import sample
from sampling_requests import LEAST_P, PENALISED, PROMPT, REQUESTS, SAMPLING, VIEWS, ask, draw, ways_of_rounds
from serving import accept_length

pytest.importorskip("sglang")
# test_parallel_heads.py has the short form with captured rounds.
pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize("plugin", ways_of_rounds("synchronous"), indirect=True),
]


@pytest.fixture(scope="module")
def count(request):
    """n; filters that are left out have p-values of 1e-17 and less with half of the requests already."""
    return REQUESTS // 2 if "not matrix" in request.config.option.markexpr else REQUESTS


@pytest.fixture(scope="module")
def drawn(plugin, count):
    """Sequences [n, 4] of the plugin, for each setting of SAMPLING."""
    return draw(plugin, SAMPLING, count)


@pytest.fixture(scope="module")
def expected(plain, count):
    """Sequences [2 * n, 4] of plain decoding; its penalties come a token late, so they are left out."""
    return draw(plain, SAMPLING, 2 * count)


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


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalised_greedy_text_is_that_of_transformers(penalties, plugin, bigram_target):
    """Beside sampled requests without penalties, and alone; test_broken_verifier.py: of retracted requests."""
    assert_penalised_greedy_text(ask_penalised(plugin, penalties), bigram_target, penalties)
