"""Heads that know their target: every draft is accepted, for a head of each kind."""

from __future__ import annotations

import pytest
from serving import GRAPHS, accept_length, generate, serving, tiny_spec
from tiny_models import read_markov_map

pytest.importorskip("sglang")
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def markov(tmp_path_factory, markov_target, markov_eagle3_reduced, markov_eagle2, markov_peagle):
    """A target whose next token depends on the current one alone, and heads that know it."""
    specs = [
        # In bfloat16 with int8 copies of their weights; the second one shares its output layer with the target.
        tiny_spec(markov_target, markov_eagle3_reduced, (4, 2, 8), dtype="bfloat16"),
        tiny_spec(markov_target, markov_eagle2, (5, 1, 6), algorithm="EAGLE", dtype="bfloat16"),
        # Captured, with the scheduler one round ahead: test_sglang_environment.py runs this file in another release.
        tiny_spec(markov_target, markov_peagle, (4, 2, 8), environment=GRAPHS | {"EAGLE_POLICY": "fixed"}),
    ]
    with serving(specs, tmp_path_factory.mktemp("markov")) as running:
        yield running


def test_a_perfect_head_reaches_the_greatest_accept_length(markov, markov_target):
    successor = read_markov_map(markov_target)
    for server, steps in zip(markov, (4, 5, 4), strict=True):
        count = 1 + 6 * (steps + 1)  # the prefill's token and six full rounds
        answer = generate(server, "root", count)
        ids = answer["output_ids"]
        assert ids[1:] == [int(successor[token]) for token in ids[:-1]]
        assert accept_length([answer]) == steps + 1
