"""Targets whose own layers for multi-token prediction (MTP) draft trees in vLLM: text and distribution of plain
decoding, with the drafts of vLLM's own chain."""

from __future__ import annotations

from pathlib import Path

import mtp_models
import pytest
import vllm_greedy
import vllm_requests
from vllm_bigram import draw
from vllm_engines import engine, generate, random_shapes, rounds
from vllm_requests import check_aborts, check_distribution

from eagle_plugin.vllm import draft_weights

SETTINGS = [{"temperature": 1.0}, {"temperature": 0.5}]
CHUNKS = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}


FAMILIES = ["mimo", *(pytest.param(family, marks=pytest.mark.matrix) for family in mtp_models.FAMILIES)]


def prompts_of(family: str) -> list[list[int]]:
    return vllm_greedy.make_prompts(10) if family == "mimo" else vllm_requests.make_prompts(10)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_distribution(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trees of every shape, prompts in parts and from the prefix cache, aborts, sampling."""
    target, prompts = mtp_models.mtp_target(tmp_path, family), prompts_of(family)
    with engine(target) as llm:
        expected, sampled = generate(llm, prompts), draw(llm, SETTINGS, 500)
    assert len({tuple(answer) for answer in expected}) > len(prompts) * 0.8, "equality would prove little"
    with engine(target, target, depth=3, topk=8, nodes=32, **CHUNKS) as llm:
        for _ in range(2):  # then from the prefix cache
            before = rounds(llm)
            assert generate(llm, prompts) == expected
            count, tokens = rounds(llm, before)
            assert tokens / count > (1.8 if family == "mimo" else 1.2)
        with random_shapes(llm):
            assert generate(llm, prompts) == expected
            check_aborts(llm, prompts, expected)
            check_distribution(llm, SETTINGS, sampled, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_is_that_of_vllm(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rounds for the same text: each draft reads what vLLM's own reads."""
    monkeypatch.setattr(draft_weights, "native_kernel", lambda: None)  # no weights of fewer bits
    target, prompts, found = mtp_models.mtp_target(tmp_path, family), prompts_of(family), []
    for chain in (False, True):
        with engine(target, target, depth=3, topk=1, nodes=4, chain=chain) as llm:
            found.append((generate(llm, prompts), rounds(llm)))
    assert found[0] == found[1]
