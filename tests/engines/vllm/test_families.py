"""Targets of other families than Llama in vLLM: text and distribution of plain decoding, by accepted trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import CHANGES, KINDS, family_head, family_target, sampling_settings
from vllm_bigram import draw
from vllm_engines import engine, generate, random_shapes, rounds
from vllm_requests import check_aborts, check_distribution, make_prompts

from eagle_plugin.vllm.head_forwards import CacheGroupsError

FEW = 8  # prompts
TOKENS = 64  # four windows of the targets that have windows
# vLLM takes EAGLE-3 heads of no Gemma 3 (`SupportsEagle3`).
NO_EAGLE3 = ("gemma3_text",)
# Of Qwen3-Next vLLM has no plain decoding in float32 on CPUs: test_linear_attention.py
# Heads and numbers of prompts: the first one in ``make test``, all in ``make test-matrix``, with sampled text.
CASES = [
    ("gpt_oss", "eagle3", FEW),
    *(
        pytest.param(family, kind, 50, marks=pytest.mark.matrix)
        for family in CHANGES
        for kind in KINDS
        if family != "qwen3_next" and (kind == "eagle2" or family not in NO_EAGLE3)
    ),
]


@pytest.mark.parametrize(("family", "kind", "asked"), CASES)
def test_text_equals_plain_decoding(
    family: str, kind: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy text is equal, sampled text of one distribution; a verifier with a wrong temperature is found out."""
    target = family_target(tmp_path / "target", family)
    head, prompts = family_head(tmp_path / "head", target, kind), make_prompts(asked)
    settings = sampling_settings(family)
    with engine(target) as llm:
        expected = generate(llm, prompts, max_tokens=TOKENS)
        sampled = draw(llm, settings, 500) if asked > FEW else []
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
            if sampled:
                check_distribution(llm, settings, sampled, monkeypatch)


def test_a_head_whose_layers_get_caches_of_several_groups(tmp_path: Path) -> None:
    """Four layers with windows, and six without: vLLM makes three groups, and gives the head's two layers to two."""
    target, prompts = family_target(tmp_path / "target", "gpt_oss"), make_prompts(FEW)
    head = family_head(tmp_path / "head", target, "peagle", layers=2)
    with pytest.raises(CacheGroupsError, match="2 layers into 2 groups"), engine(target, head):
        pass
    with engine(target) as llm:
        expected = generate(llm, prompts, max_tokens=TOKENS)
    with engine(target, head, depth=3, topk=8, nodes=32, disable_hybrid_kv_cache_manager=True) as llm:
        before = rounds(llm)
        assert generate(llm, prompts, max_tokens=TOKENS) == expected
        count, tokens = rounds(llm, before)
        assert tokens / count > 1.2
