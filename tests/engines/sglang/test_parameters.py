"""Stops, biases, minimal lengths, several choices and custom processors under speculation."""

from __future__ import annotations

import re

import pytest
from sampling_requests import PROMPT, ask, post

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

EOS = 1  # of the tiny targets
PROMPTS = [PROMPT, "the quick brown fox", "a", "one two three four", "x = y", "hello"]
GREEDY = {"temperature": 0, "max_new_tokens": 48}


def endings(answers) -> list[tuple]:
    return [(a["text"], a["output_ids"], a["meta_info"]["finish_reason"]) for a in answers]


def test_stops_end_the_text_where_plain_decoding_ends(plugin, plain):
    free = ask(plain, PROMPTS, GREEDY)
    settings = []
    for i, answer in enumerate(free):
        middle = len(answer["text"]) // 2
        piece = answer["text"][middle : middle + 2]
        settings += [
            GREEDY | {"stop": [piece, "never said"]},
            GREEDY | {"stop_token_ids": [answer["output_ids"][17 + i]], "ignore_eos": False},
            GREEDY | {"stop_regex": re.escape(piece)},
            GREEDY | {"stop": piece, "no_stop_trim": True},
        ]
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    ours, theirs = (ask(server, prompts, settings) for server in (plugin, plain))
    assert endings(ours) == endings(theirs)
    assert [s for s, a in zip(settings, ours, strict=True) if a["meta_info"]["finish_reason"]["type"] != "stop"] == []
    for setting, answer in zip(settings, ours, strict=True):
        if isinstance(setting.get("stop"), list):
            assert setting["stop"][0] not in answer["text"]


def test_stops_hold_in_sampled_text(plugin):
    answers = ask(plugin, [PROMPT] * 64, {"temperature": 1.2, "max_new_tokens": 60, "stop": ["e", "q"]})
    stopped = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(stopped) > 32
    for answer in answers:
        assert not {"e", "q"} & set(answer["text"])


@pytest.mark.parametrize("minimum", [1, 2, 3, 5, 8, 13])
def test_a_minimal_length_is_kept_to_the_token(minimum, plugin):
    """The end token is almost certain wherever it is allowed, so a text ends right after its minimal length."""
    sampling = {"max_new_tokens": 30, "min_new_tokens": minimum, "ignore_eos": False, "logit_bias": {str(EOS): 100.0}}
    settings = [sampling | {"temperature": temperature} for temperature in (0, 1.0)] * len(PROMPTS)
    for answer in ask(plugin, [p for p in PROMPTS for _ in range(2)], settings):
        assert answer["output_ids"].index(EOS) == minimum
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_the_end_token_is_ignored_on_demand(plugin):
    sampling = {"temperature": 1.0, "max_new_tokens": 20, "logit_bias": {str(EOS): 11.0}}
    on, off = (ask(plugin, [PROMPT] * 32, sampling | {"ignore_eos": ignore}) for ignore in (False, True))
    assert min(len(a["output_ids"]) for a in on) < 20
    assert all(len(a["output_ids"]) == 20 for a in off)
    assert any(EOS in a["output_ids"] for a in off)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_biases_forbid_and_force_tokens(temperature, plugin):
    common = {"temperature": temperature, "max_new_tokens": 24}
    free = ask(plugin, PROMPTS, common)
    generated = {token for answer in free for token in answer["output_ids"]}
    forbidden = sorted(generated)[::2]
    settings = [common | {"logit_bias": {str(t): -100.0 for t in forbidden}}, common | {"logit_bias": {"88": 100.0}}]
    answers = ask(plugin, [p for p in PROMPTS for _ in range(2)], settings * len(PROMPTS))
    for answer in answers[::2]:
        assert not set(answer["output_ids"]) & set(forbidden)
    for answer in answers[1::2]:
        assert answer["output_ids"] == [88] * 24


def test_n_choices(plugin, plain):
    body = {"model": "default", "prompt": PROMPTS[:2], "max_tokens": 24, "n": 3, "ignore_eos": True}
    sampled = post(plugin, "/v1/completions", body | {"temperature": 1.0})["choices"]
    assert [choice["index"] for choice in sampled] == list(range(6))
    assert len({choice["text"] for choice in sampled}) == 6
    greedy = [post(s, "/v1/completions", body | {"temperature": 0})["choices"] for s in (plugin, plain)]
    assert [c["text"] for c in greedy[0]] == [c["text"] for c in greedy[1]]
    penalties = {"temperature": 0, "frequency_penalty": 0.8}
    choices = post(plugin, "/v1/completions", body | penalties)["choices"]
    single = [
        post(plugin, "/v1/completions", body | penalties | {"n": 1, "prompt": p})["choices"][0]["text"]
        for p in PROMPTS[:2]
    ]
    assert [choice["text"] for choice in choices] == [single[0]] * 3 + [single[1]] * 3


def test_custom_logit_processors_run_one_token_a_round(plugin, plain):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    generated = ask(plain, [PROMPT], GREEDY)[0]["output_ids"]
    sampling = GREEDY | {"custom_params": {"token_ids": sorted(set(generated))[::2]}}
    processor = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    ours, theirs = (ask(server, [PROMPT] * 2, sampling, **processor) for server in (plugin, plain))
    assert endings(ours) == endings(theirs)
    assert ours[0]["output_ids"] != generated
    assert all(a["meta_info"]["spec_verify_ct"] == len(a["output_ids"]) - 1 for a in ours)


def test_unknown_and_impossible_parameters_are_refused(plugin):
    """By the engine, before they reach a worker; the server lives on."""
    wrongs = [{"temperature": -1}, {"top_p": 0}, {"seed": 1}, {"frequency_penalty": 3}, {"logit_bias": {"9999": 1}}]
    for wrong in wrongs:
        with pytest.raises(RuntimeError, match="answered 400"):
            ask(plugin, [PROMPT], GREEDY | wrong)
    assert ask(plugin, [PROMPT], GREEDY)[0]["meta_info"]["completion_tokens"] == 48
