"""Quantised targets in SGLang: text of plain decoding of the same checkpoint, by accepted trees."""

from __future__ import annotations

from pathlib import Path

import broken_verifier
import pytest
from family_models import family_head, family_target
from penalised_greedy import greedy_ids
from quantised_models import quantise
from serving import OVERLAP, accept_length, generate_all, responses, serving, tiny_spec
from word_prompts import make_prompts

pytest.importorskip("sglang")
pytestmark = pytest.mark.server

TOKENS = 64


def test_text_equals_plain_decoding(tmp_path: Path) -> None:
    """AWQ, whose layers have no `weight`: their products are ours (sglang_dequantised.py), all else is the engine's."""
    plain, prompts = family_target(tmp_path / "plain", "llama"), make_prompts(16)
    target, head = quantise(tmp_path / "target", plain, "awq"), family_head(tmp_path / "head", plain)
    environment = OVERLAP | broken_verifier.install(tmp_path / "plugins", "sglang_dequantised")
    specs = [
        tiny_spec(target, environment=environment),
        tiny_spec(target, head, (3, 8, 32), environment=environment),
    ]
    with serving(specs, tmp_path / "logs") as (decoding, plugin):
        decoded = generate_all(decoding, prompts, TOKENS, at_once=4)
        expected = responses(decoded)
        answers = generate_all(plugin, prompts, TOKENS, at_once=8)
        assert responses(answers) == expected
        assert accept_length(answers) > 1.1  # shapes are random, and some allow one token only
        assert len(set(expected)) > len(prompts) * 0.8, "equality would prove little"
        unquantised = [greedy_ids(plain, prompt, TOKENS, {}) for prompt in prompts[:4]]
        assert unquantised != [answer["output_ids"] for answer in decoded[:4]]
