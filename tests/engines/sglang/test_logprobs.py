"""Log probabilities under speculation: of the output tokens, of the best ones, and of those asked for."""

from __future__ import annotations

import pytest
import torch
from sampling_distribution import next_logits, prompt_ids
from sampling_requests import PROMPT, ask, post

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

TOLERANCE = 2e-4  # nats: float32 logits up to 30, computed in batches of another shape
PROMPTS = [PROMPT, "the quick brown fox", "a", "one two three four"]
ASKED = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [70, 75, 80]}
PENALTIES = {"frequency_penalty": 0.5, "repetition_penalty": 1.2}


def values_of(rows) -> list[list[float]]:
    return [[entry[0] for entry in row] for row in rows]


def tokens(rows) -> list[list[int]]:
    return [[entry[1] for entry in row] for row in rows]


def close(found: list, wanted: list) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=TOLERANCE, rtol=0)


def test_greedy_log_probabilities_are_those_of_plain_decoding(plugin, plain):
    sampling = {"temperature": 0, "max_new_tokens": 24}
    ours, theirs = (
        [answer["meta_info"] for answer in ask(server, PROMPTS, sampling, **ASKED)] for server in (plugin, plain)
    )
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine["spec_verify_ct"] < 23, "no draft was accepted"
        assert tokens([mine["output_token_logprobs"]]) == tokens([reference["output_token_logprobs"]])
        close(values_of([mine["output_token_logprobs"]]), values_of([reference["output_token_logprobs"]]))
        for kind in ("output_top_logprobs", "output_token_ids_logprobs"):
            assert tokens(mine[kind]) == tokens(reference[kind])
            close(values_of(mine[kind]), values_of(reference[kind]))
        assert tokens(mine["output_token_ids_logprobs"])[0] == ASKED["token_ids_logprob"]


def test_sampled_log_probabilities_are_those_of_the_same_text_as_a_prompt(plugin, plain, bigram_target):
    """At temperature 1 the engine's two kinds of log probability mean the same."""
    for answer, prompt in zip(
        ask(plugin, PROMPTS, {"temperature": 1.0, "max_new_tokens": 24}, return_logprob=True), PROMPTS, strict=True
    ):
        generated = answer["meta_info"]["output_token_logprobs"]
        assert tokens([generated]) == [answer["output_ids"]]
        start = answer["meta_info"]["prompt_tokens"]
        again = post(
            plain,
            "/generate",
            {
                "input_ids": prompt_ids(bigram_target, prompt) + answer["output_ids"],
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": start - 1,
            },
        )["meta_info"]["input_token_logprobs"]
        assert tokens([again[-24:]]) == [answer["output_ids"]]
        close(values_of([generated]), values_of([again[-24:]]))


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.4} | PENALTIES])
def test_temperature_and_penalties_are_in_the_log_probabilities_and_filters_are_not(sampling, plugin, bigram_target):
    """By transformers; the engine's rule, see the table in docs/sampling.md."""
    length = 16
    start = prompt_ids(bigram_target, PROMPT)
    for answer in ask(plugin, [PROMPT] * 4, sampling | {"max_new_tokens": length}, return_logprob=True):
        wanted = []
        times = torch.zeros(1, 0)
        for i, token in enumerate(answer["output_ids"]):
            logits = next_logits(bigram_target, torch.tensor([start + answer["output_ids"][:i]]))
            times = torch.zeros_like(logits) if i == 0 else times
            logits = logits - sampling.get("frequency_penalty", 0.0) * times
            scale = torch.where(times > 0, sampling.get("repetition_penalty", 1.0), 1.0)
            logits = torch.where(logits > 0, logits / scale, logits * scale)
            wanted.append((logits / sampling["temperature"]).log_softmax(-1)[0, token].item())
            times[0, token] += 1
        close([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]], wanted)


def test_openai_log_probabilities(plugin):
    body = {"model": "default", "messages": [{"role": "user", "content": "tree"}], "max_tokens": 12, "temperature": 0}
    choice = post(plugin, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12
    for entry in entries:
        assert entry["logprob"] == max(top["logprob"] for top in entry["top_logprobs"])
        assert len(entry["top_logprobs"]) == 2
