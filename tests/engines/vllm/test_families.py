"""Targets of other families than Llama in vLLM: text and distribution of plain decoding, by accepted trees."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import broken_verifier
import pytest
from family_models import CHANGES, VOCAB, family_head, family_target
from gtest import p_values
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm_bigram import draw
from vllm_engines import engine, free_blocks, generate, random_shapes, rounds, settle

from eagle_plugin.engines import round as decode_round

TOKENS = 96  # five windows of the targets that have windows
LEAST_P = 1e-7
ALWAYS = ("gpt_oss",)
# vLLM takes EAGLE-3 heads of no Gemma 3 (`SupportsEagle3`).
NO_EAGLE3 = ("gemma3_text",)
FAMILIES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.matrix) for name in CHANGES]


def make_prompts(count: int) -> list[list[int]]:
    """Every fifth has the same beginning, and some are longer than a chunk."""
    dice = random.Random(11)
    shared = dice.choices(range(3, VOCAB), k=40)
    prompts = [dice.choices(range(3, VOCAB), k=dice.choice((1, 9, 30, 100))) for _ in range(count)]
    return [[*shared, *prompt] if i % 5 == 0 else prompt for i, prompt in enumerate(prompts)]


def wrong_temperature(*arguments: Any, filters: str) -> Any:
    return broken_verifier.FAULTS["temperature one"](*arguments)


def check_aborts(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """200 requests, of which every third is aborted within its first rounds; then every block is free again."""
    served, before = llm.llm_engine, free_blocks(llm)
    settings = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    found: dict[str, list[int]] = {}
    for number in range(200):
        served.add_request(f"{number}", TokensPrompt(prompt_token_ids=prompts[number % len(prompts)]), settings)
        for answer in served.step():
            if answer.finished:
                found[answer.request_id] = list(answer.outputs[0].token_ids)
        if number % 3 == 0:
            served.abort_request([f"{number}"])
    while served.has_unfinished_requests():
        found |= {answer.request_id: list(answer.outputs[0].token_ids) for answer in served.step() if answer.finished}
    settle(llm)
    assert len(found) > 130 and free_blocks(llm) == before
    assert all(answer == expected[int(name) % len(prompts)][:8] for name, answer in found.items())


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle2", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_plain_decoding(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy text is equal, sampled text of one distribution; a verifier with a wrong temperature is found out."""
    if kind == "eagle3" and family in NO_EAGLE3:
        kind = "eagle2"
    target = family_target(tmp_path / "target", family)
    head, prompts = family_head(tmp_path / "head", target, kind), make_prompts(50)
    settings = [{"temperature": 1.0}, {"temperature": 0.5}]
    with engine(target) as llm:
        expected = generate(llm, prompts, max_tokens=TOKENS)
        sampled = draw(llm, settings, 500)
    assert len({tuple(answer) for answer in expected}) > len(prompts) * 0.8, "equality would prove little"
    chunks = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    with engine(target, head, depth=3, topk=8, nodes=32, **chunks) as llm:
        for _ in range(2):  # then from the prefix cache
            before = rounds(llm)
            assert generate(llm, prompts, max_tokens=TOKENS) == expected
            count, tokens = rounds(llm, before)
            assert tokens / count > 1.2
        with random_shapes(llm):
            assert generate(llm, prompts, max_tokens=TOKENS) == expected
            check_aborts(llm, prompts, expected)
            for ours, theirs in zip(draw(llm, settings, 300), sampled, strict=True):
                found = p_values(ours, theirs)
                assert min(found.values()) > LEAST_P, found
            monkeypatch.setattr(decode_round, "verify_tree", wrong_temperature)
            control = p_values(draw(llm, settings[1:], 300)[0], sampled[1])
            assert min(control.values()) < LEAST_P**2, control
