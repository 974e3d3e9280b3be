"""A target with a sliding window: trees see the same keys as plain decoding, and freed blocks harm nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import read_config
from vllm_engines import accept_length, engine, generate
from vllm_greedy import make_prompts, write_heads, write_target

PROMPTS = [(prompt * 3)[:120] for prompt in make_prompts(12)]


@pytest.mark.parametrize(
    "window", [pytest.param(8, id="narrow", marks=pytest.mark.matrix), pytest.param(40, id="wider than a block")]
)
def test_text_equals_plain_decoding(tmp_path: Path, window: int) -> None:
    target = write_target(tmp_path)
    head = next(iter(write_heads(tmp_path, target).values()))
    with engine(target) as llm:
        everything = generate(llm, PROMPTS, max_tokens=40)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (target / "config.json").write_text(json.dumps(read_config(target) | mistral))
    with engine(target) as llm:
        plain = generate(llm, PROMPTS, max_tokens=40)
    assert sum(a != b for a, b in zip(plain, everything, strict=True)) > len(PROMPTS) // 2  # the window counts
    with engine(target, head, depth=3, topk=3) as llm:
        assert generate(llm, PROMPTS, max_tokens=40) == plain
        assert accept_length(llm) > 1.5
