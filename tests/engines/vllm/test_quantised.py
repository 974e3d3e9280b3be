"""Quantised targets in vLLM: text and distribution of plain decoding of the same checkpoint, by accepted trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_dequantised
from family_models import family_head, family_target, sampling_settings
from quantised_models import quantise
from vllm import LLM
from vllm_bigram import draw
from vllm_engines import engine, generate, rounds
from vllm_requests import ROUNDING, check_distribution, losses, make_prompts

TOKENS = 64
TREES: dict[str, Any] = {"depth": 3, "topk": 8, "nodes": 32}
ALWAYS = "w4a16"


def weights_alone(name: str) -> Any:
    """Formats whose inputs are not rounded."""
    return pytest.param(name, marks=() if name == ALWAYS else pytest.mark.matrix)


@pytest.mark.parametrize("name", [weights_alone(name) for name in ("w4a16", "gptq", "awq", "fp8-block")])
def test_text_equals_plain_decoding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy text is equal, sampled text of one distribution; a verifier with a wrong temperature is found out."""
    vllm_dequantised.install(monkeypatch)
    plain, prompts = family_target(tmp_path / "plain", "llama"), make_prompts(8)
    target, head = quantise(tmp_path / "target", plain, name), family_head(tmp_path / "head", plain)
    settings = sampling_settings("llama")
    with engine(target) as llm:
        expected = generate(llm, prompts, max_tokens=TOKENS)
        sampled = draw(llm, settings, 500) if name != ALWAYS else []
    with engine(plain) as llm:
        assert generate(llm, prompts, max_tokens=TOKENS) != expected, "the weights are those of the plain target"
    assert len({tuple(answer) for answer in expected}) > len(prompts) * 0.8, "equality would prove little"
    with engine(target, head, **TREES) as llm:
        assert generate(llm, prompts, max_tokens=TOKENS) == expected
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
        if sampled:
            check_distribution(llm, settings, sampled, monkeypatch)


@pytest.mark.matrix
def test_a_quantised_output_layer_is_the_heads_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ's lm_head has no `weight`; an EAGLE-2 head drafts by the target's."""
    vllm_dequantised.install(monkeypatch)
    plain, prompts = family_target(tmp_path / "plain", "llama"), make_prompts(16)
    target = quantise(tmp_path / "target", plain, "gptq", output=True)
    head = family_head(tmp_path / "head", plain, "eagle2")
    with engine(target) as llm:
        assert not hasattr(_model(llm).lm_head, "weight")
        expected = generate(llm, prompts, max_tokens=TOKENS)
    with engine(target, head, **TREES) as llm:
        assert generate(llm, prompts, max_tokens=TOKENS) == expected
        count, tokens = rounds(llm)
        assert tokens / count > 1.2


def _model(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


@pytest.mark.matrix
def test_rounded_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of a sum may round an input to another number: texts part where two tokens are nearly as likely.

    So every greedy token is compared with the best one of plain decoding, and sampled text with its distribution. The
    controls: the text of another target, and the broken verifier.
    """
    # With AMX vLLM's kernel takes bfloat16 alone: test_amx.py.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    plain, prompts = family_target(tmp_path / "plain", "llama"), make_prompts(16)
    target, head = quantise(tmp_path / "target", plain, "w8a8-int8"), family_head(tmp_path / "head", plain)
    settings = sampling_settings("llama")
    with engine(plain) as llm:
        other = generate(llm, prompts, max_tokens=TOKENS)
    with engine(target) as llm:
        sampled = draw(llm, settings, 500)
    with engine(target, head, **TREES) as llm:
        found = generate(llm, prompts, max_tokens=TOKENS)
        count, tokens = rounds(llm)
        assert tokens / count > 1.2
        check_distribution(llm, settings, sampled, monkeypatch)
    with engine(target) as llm:
        largest = [max(losses(llm, prompts, answers)) for answers in (found, other)]
    assert largest[0] < ROUNDING < largest[1], largest
