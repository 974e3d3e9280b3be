"""Targets whose own layers for multi-token prediction (MTP) draft trees in vLLM: text and distribution of plain
decoding, with the drafts of vLLM's own chain."""

from __future__ import annotations

from pathlib import Path

import mtp_models
import pytest
from vllm_bigram import draw
from vllm_engines import engine, generate, random_shapes, rounds
from vllm_greedy import make_prompts
from vllm_requests import check_aborts, check_distribution

from eagle_plugin.vllm import draft_weights

SETTINGS = [{"temperature": 1.0}, {"temperature": 0.5}]
CHUNKS = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}


def test_text_and_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = mtp_models.mimo_target(tmp_path), make_prompts(10)
    with engine(target) as llm:
        expected, sampled = generate(llm, prompts), draw(llm, SETTINGS, 500)
    assert len({tuple(answer) for answer in expected}) > len(prompts) * 0.8, "equality would prove little"
    with engine(target, target, depth=3, topk=4, nodes=16, **CHUNKS) as llm:
        for _ in range(2):  # then from the prefix cache
            before = rounds(llm)
            assert generate(llm, prompts) == expected
            count, tokens = rounds(llm, before)
            assert tokens / count > 1.8
        with random_shapes(llm):
            assert generate(llm, prompts) == expected
            check_aborts(llm, prompts, expected)
            check_distribution(llm, SETTINGS, sampled, monkeypatch)


def test_a_chain_is_that_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds for the same text: each draft reads what vLLM's own reads."""
    monkeypatch.setattr(draft_weights, "native_kernel", lambda: None)  # no weights of fewer bits
    target, prompts = mtp_models.mimo_target(tmp_path), make_prompts(10)
    found = []
    for chain in (False, True):
        with engine(target, target, depth=3, topk=1, nodes=4, chain=chain) as llm:
            text = generate(llm, prompts)
            found.append((text, rounds(llm)))
    assert found[0] == found[1]
