"""Seeds under speculation: a seeded request says the same alone, in any batch, and again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gtest import p_values
from sampling_distribution import distribution, next_logits, prompt_ids, sample
from sampling_requests import AT_ONCE, PROMPT, ask, post, ways_of_rounds
from serving import accept_length

pytest.importorskip("sglang")

from eagle_plugin.core.gumbel import draw_tokens
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.runtime.rng import request_keys

# In make test with captured rounds of random shapes, which know a request's seed in the most ways. That synchronous
# rounds of one shape draw the same by a seed is shown by test_tensor_parallel.py, whose one rank runs them.
pytestmark = [
    pytest.mark.server,
    pytest.mark.parametrize("plugin", ways_of_rounds("synchronous"), indirect=True),
]

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5},
]
LENGTH = 32


def text(server, sampling: dict) -> str:
    return ask(server, [PROMPT], sampling | {"max_new_tokens": LENGTH})[0]["text"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_fixes_the_text_alone_and_in_a_batch(setting, plugin):
    seeds = [0, 1, -7, 2**63 - 1]
    alone = [text(plugin, setting | {"sampling_seed": seed}) for seed in seeds]
    assert alone == [text(plugin, setting | {"sampling_seed": seed}) for seed in seeds]
    assert len(set(alone)) == len(seeds)
    others = [{"temperature": 1.0}, {"temperature": 0}, {"temperature": 1.0, "sampling_seed": 5}]
    batch = [s | {"max_new_tokens": LENGTH} for seed in seeds for s in (setting | {"sampling_seed": seed}, *others)]
    answers = ask(plugin, [PROMPT] * len(batch), batch)
    assert [answer["text"] for answer in answers[:: len(others) + 1]] == alone


def drawn_by_seed(target, setting: dict, seed: int) -> list[int]:
    """The tokens of a seeded request, without drafts: each is drawn with the noise of the position before it."""
    ids, times = torch.tensor([prompt_ids(target, PROMPT)]), None
    for _ in range(LENGTH):
        logits = next_logits(target, ids)
        times = torch.zeros_like(logits) if times is None else times
        p = distribution(logits, times, setting).float()
        key, position = request_keys(1, {0: seed}), torch.tensor([ids.shape[1] - 1])
        token = draw_tokens(p.log(), SamplingParams.of(1), key, position)[:, None]
        times = times.scatter_add(1, token, torch.ones(1, 1))
        ids = torch.cat([ids, token], dim=1)
    return ids[0, -LENGTH:].tolist()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seeded_text_does_not_depend_on_drafts(setting, plugin, bigram_target):
    """The server drafts trees, of one shape or of any; the tokens are those of the seed without drafts."""
    seeds = [0, -7, 2**63 - 1]
    answers = [ask(plugin, [PROMPT], setting | {"sampling_seed": seed, "max_new_tokens": LENGTH})[0] for seed in seeds]
    assert [answer["output_ids"] for answer in answers] == [
        drawn_by_seed(bigram_target, setting, seed) for seed in seeds
    ]
    assert accept_length(answers) > 1.05, "nothing was accepted: every text would be that of plain rounds"


def test_a_seed_of_the_openai_endpoints(plugin):
    shared = {"model": "default", "max_tokens": LENGTH, "temperature": 1, "ignore_eos": True}
    asked = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "tree"}]},
        "/v1/completions": {"prompt": PROMPT},
    }
    for path, question in asked.items():
        generated = []
        for seed in (3, 3, 4, None, None):
            choice = post(plugin, path, shared | question | {"seed": seed})["choices"][0]
            generated.append(choice["text"] if "text" in choice else choice["message"]["content"])
        assert generated[0] == generated[1]
        assert len(set(generated)) == 4, "different seeds, or none, gave one text"


def test_n_choices_of_one_seed_are_the_same_and_of_none_are_not(plugin):
    """The engine sends n copies of the request, seed included."""
    body = {"model": "default", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 1, "ignore_eos": True, "n": 3}
    for seed, different in ((8, 1), (None, 3)):
        choices = post(plugin, "/v1/completions", body | {"seed": seed})["choices"]
        assert len({choice["text"] for choice in choices}) == different


def test_different_seeds_draw_from_the_targets_distribution(plugin, bigram_target):
    """Numbers that were not random over seeds, or shared by draft and verification, would show here."""
    setting, count = SETTINGS[1], 500
    drawn = []
    for first in range(0, count, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        turns = [setting | {"sampling_seed": seed, "max_new_tokens": 4} for seed in seeds]
        drawn += [answer["output_ids"] for answer in ask(plugin, [PROMPT] * len(turns), turns)]
    found = p_values(np.array(drawn), sample(bigram_target, PROMPT, setting, 2 * count, 4, seed=3).numpy())
    assert min(found.values()) > 1e-4 / len(found), found
