"""Requests to engines of targets of any family inside the test's process, and a verifier with a fault."""

from __future__ import annotations

import random
from typing import Any

import broken_verifier
import numpy as np
import pytest
from family_models import VOCAB
from gtest import p_values
from numpy.typing import NDArray
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_bigram import draw
from vllm_engines import free_blocks, run, settle

from eagle_plugin.runtime import accept

LEAST_P = 1e-7
# Of the logarithms of probabilities: a greedy token of a target whose inputs are rounded to eight bits may be this much
# less likely than the best one, after a sum of floats in another order.
ROUNDING = 0.25


def make_prompts(count: int) -> list[list[int]]:
    """Every fifth has the same beginning, and some are longer than a chunk."""
    dice = random.Random(11)
    shared = dice.choices(range(3, VOCAB), k=40)
    prompts = [dice.choices(range(3, VOCAB), k=dice.choice((1, 9, 30, 100))) for _ in range(count)]
    return [[*shared, *prompt] if i % 5 == 0 else prompt for i, prompt in enumerate(prompts)]


def check_aborts(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """80 requests, of which every third is aborted within its first rounds; then every block is free again."""
    served, before = llm.llm_engine, free_blocks(llm)
    settings = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    found: dict[str, list[int]] = {}
    for number in range(80):
        served.add_request(f"{number}", TokensPrompt(prompt_token_ids=prompts[number % len(prompts)]), settings)
        for answer in served.step():
            if answer.finished:
                found[answer.request_id] = list(answer.outputs[0].token_ids)
        if number % 3 == 0:
            served.abort_request([f"{number}"])
    while served.has_unfinished_requests():
        found |= {answer.request_id: list(answer.outputs[0].token_ids) for answer in served.step() if answer.finished}
    settle(llm)
    assert len(found) > 52 and free_blocks(llm) == before
    assert all(answer == expected[int(name) % len(prompts)][:8] for name, answer in found.items())


def check_distribution(
    llm: LLM, settings: list[dict[str, Any]], expected: list[NDArray[np.int64]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 answers for each setting have the distribution of those expected; the last setting's faulty ones have not."""
    for ours, theirs in zip(draw(llm, settings, 300), expected, strict=True):
        found = p_values(ours, theirs)
        assert min(found.values()) > LEAST_P, found
    monkeypatch.setattr(accept, "verify_tree", broken_verifier.FAULTS["temperature one"])
    control = p_values(draw(llm, settings[1:], 300)[0], expected[1])
    assert min(control.values()) < LEAST_P**2, control


def losses(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """By how much each token of the answers is less likely to the target than its best one, in logarithms."""
    found = []
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    for prompt, text, output in zip(prompts, whole, run(llm, whole, max_tokens=1, prompt_logprobs=1), strict=True):
        for token, likely in list(zip(text, output.prompt_logprobs, strict=True))[len(prompt) :]:
            found.append(max(one.logprob for one in likely.values()) - likely[token].logprob)
    return found
