"""Targets of other families than Llama in vLLM: the text of plain decoding, from trees that are accepted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from family_models import CHANGES, VOCAB, family_head, family_target
from vllm_engines import engine, generate, random_shapes, rounds

TOKENS = 96  # five windows of the targets that have windows
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


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle2", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_plain_decoding(family: str, kind: str, tmp_path: Path) -> None:
    if kind == "eagle3" and family in NO_EAGLE3:
        kind = "eagle2"
    target = family_target(tmp_path / "target", family)
    head, prompts = family_head(tmp_path / "head", target, kind), make_prompts(24)
    with engine(target) as llm:
        expected = generate(llm, prompts, max_tokens=TOKENS)
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
